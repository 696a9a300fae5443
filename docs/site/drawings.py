"""Draw docs/figures/*.svg for docs/how_it_works.md: `python docs/site/drawings.py`.

Every number is a result of the operators of the package. All attention maps read the same six tokens.
"""

from pathlib import Path

import torch

from luna_mega.kernels.api import (
    complex_ema,
    damped_ema,
    gated_attention,
    luna_causal_attention,
    luna_pack,
    luna_unpack,
)

FOLDER = Path(__file__).resolve().parents[1] / "figures"
TOKENS, ROWS, CHUNK, POSITIONS = 6, 2, 3, 12
WIDTH, CELL, LEFT, TOP = 270, 35, 34, 58
STYLE = """<style>
.card{fill:#fff;stroke:#d5dae2}.t{fill:#1d2430;font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
.b{font-size:14px;font-weight:600}.s{fill:#566072}.m{text-anchor:middle}.e{text-anchor:end}
.n{font-size:9px}.x{fill:#2563eb}.c{fill:none;stroke:#c4cad4}.l{stroke:#c2700c;stroke-width:2}.z{stroke:#8a94a6}
@media (prefers-color-scheme:dark){.card{fill:#171b24;stroke:#323a49}.t{fill:#e8ebf1}.s{fill:#aab3c3}
.x{fill:#6ea0ff}.c{stroke:#3a4354}.l{stroke:#eaa54a}}
</style>"""


def waves(rows: int, first: float) -> torch.Tensor:
    """Return different features `[rows, 4]` without drawing random numbers."""
    return 1.5 * torch.cos(torch.outer(torch.arange(rows) + first, torch.tensor([1.0, 2.3, 0.7, 1.9])))


def attention_maps() -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Return the attention weights by drawing."""
    x, one = waves(TOKENS, 1)[None], torch.eye(TOKENS)[None]
    tokens, packed = x[:, :, None], waves(ROWS, 0.5)[None, :, None]
    context, pack = luna_pack(packed, tokens, tokens, return_weights=True)
    _, unpack = luna_unpack(tokens, context, context, return_weights=True)
    # Values that are the rows of an identity matrix turn the output into the weights.
    mega = gated_attention(x, x, one, chunk_size=CHUNK)[0]
    megalodon = gated_attention(x, x, one, chunk_size=CHUNK, causal=True)[0]
    return {
        "attention_luna": [("P attends to the tokens", pack[0, 0]), ("tokens attend to P", unpack[0, 0])],
        "attention_mega": [("tokens attend in chunks", mega)],
        "attention_megalodon": [("tokens attend in chunks, causal", megalodon)],
    }


def averages() -> dict[str, torch.Tensor]:
    """Return the outputs of the averages for an impulse of 1 at one of the positions."""
    early, middle = torch.zeros(1, POSITIONS, 1), torch.zeros(1, POSITIONS, 1)
    early[0, 2], middle[0, POSITIONS // 2] = 1, 1
    # Two states, with decays 0.4 and 0.9: the weight of the input is 0.6 and 0.1, the damping factor 1.
    weight, damping = torch.logit(torch.tensor([[0.6, 0.1]])), torch.full((1, 2), 20.0)
    one = torch.ones(1, 2)
    both = [parameter.repeat(2, 1) for parameter in (weight, damping, one, one)]
    turned = complex_ema(
        early,
        torch.logit(torch.tensor([[0.3]])),
        torch.logit(torch.tensor([[0.4]])),
        torch.logit(torch.tensor([1 / 6])),
        torch.tensor([[[1.0, 0.0]]]),
    )
    return {
        "average_damped": damped_ema(early, weight, damping, one, one)[0, :, 0],
        "average_two_directions": damped_ema(middle, *both)[0, :, 0],
        "average_complex": turned[0, :, 0],
    }


def border_maps() -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Return the share of every token in the output of every token, in decoders."""
    impulses = torch.eye(TOKENS)[:, :, None]  # one impulse per row of the batch
    slow = [torch.logit(torch.tensor([[0.3]])), torch.full((1, 1), 20.0), torch.ones(1, 1), torch.ones(1, 1)]
    x, p = waves(TOKENS, 1)[None, :, None], waves(ROWS, 0.5)[None, :, None]
    luna = luna_causal_attention(x, p, x, x, torch.eye(TOKENS)[None, :, None])
    return {
        "border_average": [("moving average", damped_ema(impulses, *slow)[:, :, 0].T)],
        "border_luna": [("running means", luna[0, :, 0])],
    }


def numbers(values: torch.Tensor) -> list:
    """Return rounded values: the averages of some backends have rounding errors before the impulse."""
    return (torch.round(values, decimals=6) + 0.0).tolist()  # + 0.0: no -0.0


def text(x: float, y: float, words: str, classes: str = "") -> str:
    return f'<text class="t {classes}" x="{x:g}" y="{y:g}">{words}</text>'


def drawing(title: str, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    card = f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8"/>'
    lines = [f'{head} role="img">', f"<title>{title}</title>", STYLE, card, *parts, "</svg>"]
    return "\n".join(lines) + "\n"


def draw_map(title: str, maps: list[tuple[str, torch.Tensor]], border: bool) -> str:
    """Draw matrices below each other. Cells that are always 0 have no number."""
    parts, y = [text(12, 24, title, "b")], 34
    for caption, weights in maps:
        rows, columns = weights.shape
        letters = ["x" if size == TOKENS else "p" for size in (rows, columns)]
        parts.append(text(12, y + 12, caption, "s"))
        top = y + TOP - 24
        parts += [text(LEFT + (j + 0.5) * CELL, top - 5, f"{letters[1]}{j + 1}", "s m") for j in range(columns)]
        for i, row in enumerate(numbers(weights)):
            parts.append(text(LEFT - 6, top + i * CELL + 22, f"{letters[0]}{i + 1}", "s e"))
            for j, weight in enumerate(row):
                left, above = LEFT + j * CELL, top + i * CELL
                place = f'x="{left}" y="{above}" width="{CELL}" height="{CELL}"'
                if weight:
                    parts.append(f'<rect class="x" {place} fill-opacity="{0.7 * min(weight, 1):.2f}"/>')
                    parts.append(text(left + CELL / 2, above + 22, f"{weight:.2f}", "m"))
                parts.append(f'<rect class="c" {place}/>')
        if border:
            x, end = LEFT + CHUNK * CELL, TOKENS * CELL
            parts.append(f'<path class="l" d="M{x} {top}v{end}M{LEFT} {top + CHUNK * CELL}h{end}"/>')
        y = top + rows * CELL + 8
    return drawing(title, y + 6, parts)


def draw_average(title: str, values: torch.Tensor) -> str:
    """Draw bars over the positions, and below them the numbers without the leading zero."""
    bars, step = numbers(values), 20
    first, (zero, height) = bars.index(max(bars)), (184, 130) if min(bars) >= 0 else (124, 70)
    parts = [text(12, 24, title, "b"), f'<path class="z" d="M12 {zero}h246"/>']
    for t, value in enumerate(bars):
        x, size = 25 + t * step, value / max(bars) * height
        above = min(zero, zero - size)
        parts.append(f'<rect class="x" x="{x - 6}" y="{above:.1f}" width="12" height="{abs(size):.1f}"/>')
        parts.append(text(x, 204, f"{value:.2f}".replace("0.", ".") if value else "0", "n m"))
    x = 25 + first * step
    parts.append(f'<path class="l" d="M{x} 211v10"/>')
    parts.append(text(x, 235, "impulse of 1", "s m"))
    return drawing(title, 246, parts)


def draw() -> dict[str, str]:
    """Return the drawings by their names."""
    titles = {
        "attention_luna": "Luna",
        "attention_mega": "Mega",
        "attention_megalodon": "Megalodon",
        "average_damped": "Mega, one direction",
        "average_two_directions": "Mega, two directions",
        "average_complex": "Megalodon",
        "border_average": "Mega, Megalodon",
        "border_luna": "Luna, decoder",
    }
    maps = attention_maps() | border_maps()
    found = {name: draw_map(titles[name], parts, "luna" not in name) for name, parts in maps.items()}
    return found | {name: draw_average(titles[name], values) for name, values in averages().items()}


if __name__ == "__main__":
    for name, content in draw().items():
        (FOLDER / f"{name}.svg").write_text(content, encoding="utf-8")
