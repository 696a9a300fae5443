"""Draw performance.png and operators.png from `benchmarks/results`, and results.png from the tables of its page.

`make figures` also fills the tables of measurements in the pages, the lines between `<!-- begin NAME -->` and
`<!-- end NAME -->`. The measurements of a case are those of the processor that has the newest.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DOCS.parent / "benchmarks"), str(DOCS.parent / "examples")]
import acceptance  # noqa: E402
import papers  # noqa: E402
import report  # noqa: E402

LENGTHS = [512, 4096, 16384, 65536]
METHODS = {
    "luna_mega": "diagonal_ssm",
    "torch": "diagonal_ssm in PyTorch",
    "s4d": "S4D's formula",
    "loop": "loop",
    "associative_scan": "associative_scan",
    "lfilter": "lfilter",
    "copy": "copy",
}
STYLES = ("C0o-", "C0o--", "C1s--", "C2^--", "C3v--", "C4x--", "k:")
AVERAGES = {
    "luna_mega": "C library",
    "torch": "PyTorch",
    "original": "papers' code (FFT)",
    "transformers": "transformers 4.46",
    "copy": "copy",
}
ENCODERS = {"roberta_sdpa": "RoBERTa", "luna_128": "Luna, l = 128", "mega_chunk_128": "Mega, chunks of 128"}
DECODERS = {"luna_32": "Luna, l = 32", "mega_chunk_512": "Mega, chunks of 512", "llama_sdpa": "Llama"}
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def table(page: str, heading: str) -> tuple[list[str], dict[str, list[float | None]]]:
    """Return the first table below a heading: its header, and the first cell of a row -> the numbers of the others."""
    section = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    header, _, *rows = ([cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines)
    found = {name: [NUMBER.match(cell) for cell in cells] for name, *cells in rows}
    return header[1:], {
        name: [float(number[0].replace(",", "")) if number else None for number in numbers]
        for name, numbers in found.items()
    }


def draw(axes: plt.Axes, x: list[float], y: list[float | None], style: str, label: str) -> None:
    """Draw a curve through the points that were measured."""
    points = [pair for pair in zip(x, y, strict=True) if pair[1] is not None]
    axes.plot(*zip(*points, strict=True), style, label=label)


def models(rows: list[report.Row], names: dict[str, str]) -> dict[str, dict[int, float]]:
    """Return label -> length -> milliseconds of a step with one sequence; `names` maps variants to labels."""
    found: dict[str, dict[int, float]] = {label: {} for label in names.values()}
    for row in rows:
        if row["variant"] in names and row["threads"] == 1 and row["size"].get("b", 1) == 1 and "forward_ms" in row:
            found[names[row["variant"]]][row["size"]["n"]] = row.get("both_ms", row["forward_ms"])
    return {label: dict(sorted(times.items())) for label, times in found.items() if times}


def relative(times: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """Return the speeds of models relative to the first one."""
    base, *others = times.values()
    speeds = [{n: base[n] / milliseconds for n, milliseconds in other.items() if n in base} for other in others]
    return dict(zip([*times][1:], speeds, strict=True))


def draw_performance(encoders: list[report.Row], decoders: list[report.Row]) -> None:
    """Draw the speed of a training step relative to RoBERTa, and the time of a decoding step, over the length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
    for (name, speeds), style in zip(
        relative(models(encoders, ENCODERS)).items(), ("C0o-", "C1s-", "C2^-"), strict=False
    ):
        left.plot(*zip(*speeds.items(), strict=True), style, label=name)
    left.axhline(1, color="gray", linewidth=1, label="RoBERTa")
    left.set(
        title="speed of a training step", xlabel="tokens per sequence", ylabel="relative to RoBERTa", ylim=(0, None)
    )
    for (name, times), style in zip(models(decoders, DECODERS).items(), ("C0o-", "C1s-", "C2^-"), strict=False):
        right.plot(*zip(*times.items(), strict=True), style, label=name)
    right.set(title="time of a decoding step", xlabel="tokens of context", ylabel="milliseconds", ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        lengths = sorted({int(x) for line in axes.lines for x in line.get_xdata() if x > 1})
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.legend()
    figure.suptitle(f"one core, {describe(encoders)}", fontsize="medium")
    figure.savefig(DOCS / "performance.png", dpi=150)


def fill_models(encoders: list[report.Row], decoders: list[report.Row]) -> None:
    """Fill the tables of training steps in README and of training and decoding steps on the page of performance."""
    times = models(encoders, ENCODERS)
    lengths = [*next(iter(times.values()))]
    lines = [["training step on a CPU", *(f"{n:,} tokens" for n in lengths)]]
    lines += [[name, *(f"{speeds[n]:.2f}x" for n in lengths)] for name, speeds in relative(times).items()]
    about = f"One core, {describe(encoders)}; 23 M parameters, one sequence"
    fill("../README.md", "speed", lines, about)
    fill("performance.md", "encoders", lines, about)
    times = models(decoders, DECODERS)
    lengths = [*next(iter(times.values()))]
    lines = [["context", *times], *([f"{n:,}", *(f"{found[n]:.1f}" for found in times.values())] for n in lengths)]
    fill("performance.md", "decoding", lines, f"One core, {describe(decoders)}; 23 M parameters, one sequence")


def draw_results() -> None:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    styles = {"Mega": "C1s", "Luna": "C0o", "Transformer": "C2^", "bag of words": "kx"}
    tasks: list[str] = []
    points: dict[str, list[tuple[float, int]]] = {kind: [] for kind in styles}
    for heading in ("Text classification", "Long Range Arena, small"):
        header, rows = table("results.md", heading)
        names = [name.split(",")[0].split(" of ")[0].replace("RoBERTa", "Transformer") for name in header]
        names = ["bag of words" if name == "bag" else name for name in names]
        for task, values in rows.items():
            if "accuracy" in task or heading != "Text classification":
                tasks.append(task.split(",")[0])
                for kind in styles.keys() & names:
                    if (value := values[names.index(kind)]) is not None:
                        points[kind].append((value, len(tasks) - 1))
    for kind, style in styles.items():
        axes.plot(*zip(*points[kind], strict=True), style, label=kind)
    axes.set(yticks=range(len(tasks)), yticklabels=tasks, xlabel="accuracy (%)")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(DOCS / "results.png", dpi=100)


def measurements(case: str) -> list[report.Row]:
    """Return the rows of the processor on which a case was measured last."""
    files = [report.read(file) for file in (DOCS.parent / "benchmarks" / "results").glob("*_*.json")]
    files = [rows for rows in files if any(row["case"] == case for row in rows)]
    return max(files, key=lambda rows: max(row["date"] for row in rows if row["case"] == case))


def select(rows: list[report.Row], case: str, size: str) -> dict[str, report.Row]:
    """Return the rows of a size, on one thread with default settings, by their variants."""
    wanted = {"case": case, "threads": 1, "instructions": None, "products": None}
    found = [row for row in rows if wanted.items() <= row.items() and report.size_text(row) == size]
    return {row["variant"]: row for row in found if "both_ms" in row and "error" not in row}


def curves(rows: list[report.Row]) -> dict[tuple[str, str], list[report.Row | None]]:
    """Return the rows of all `LENGTHS` for complex and real states and each variant of `diagonal_ssm`."""
    found = {}
    for real, kind in enumerate(("complex", "real")):
        sizes = [select(rows, "diagonal_ssm", f"real={real} b=4 n={n} d=64") for n in LENGTHS]
        found |= {(kind, variant): [size.get(variant) for size in sizes] for variant in METHODS}
    return {key: points for key, points in found.items() if any(points)}


def draw_operators(rows: list[report.Row]) -> None:
    """Draw the time of a forward and backward pass over the length, for 16 states."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained", sharey=True)
    styles = dict(zip(METHODS, STYLES, strict=True))
    for (kind, variant), points in curves(rows).items():
        times = [row and row["both_ms"] for row in points]
        draw(panels[int(kind == "real")], LENGTHS, times, styles[variant], METHODS[variant])
    for axes, kind in zip(panels, ("complex", "real"), strict=True):
        axes.set(xscale="log", yscale="log", xlabel="positions", title=f"16 {kind} states per channel")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("forward and backward pass, ms")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"one core, {describe(rows)}", fontsize="medium")
    figure.savefig(DOCS / "operators.png", dpi=100)


def describe(rows: list[report.Row]) -> str:
    about = rows[-1]
    return f"{about['processor']}, float32, torch {about['torch']}, {about['date'][:10]}"


def fill(page: str, name: str, lines: list[list[str]], about: str) -> None:
    """Replace a table of a page, and the line above it."""
    path, block = DOCS / page, re.compile(rf"(<!-- begin {name} -->\n).*?(?=<!-- end {name} -->)", re.DOTALL)
    table = f"{about}:\n\n{report.join(lines)}\n"
    text, count = block.subn(lambda found: found[1] + table, path.read_text(encoding="utf-8"))
    assert count == 1, f"{page} has no lines `<!-- begin {name} -->` and `<!-- end {name} -->`"
    path.write_text(text, encoding="utf-8")


def fill_tables(rows: list[report.Row]) -> None:
    about, lines = describe(rows), [["method, states", *(f"{length:,}" for length in LENGTHS)]]
    for (kind, variant), points in curves(rows).items():
        lines.append([f"{METHODS[variant]}, {kind}", *(cell(row, ", {both_mb}") for row in points)])
    fill("operators.md", "curves", lines, about)
    lines = [["average", *AVERAGES.values()]]
    for case, size in {target[1:3]: None for target in acceptance.TARGETS if target.size.startswith("b=8 n=512")}:
        found = select(rows, case, size)
        lines.append([f"`{case}`, {size}", *(cell(found.get(variant)) for variant in AVERAGES)])
    fill("operators.md", "averages", lines, about)
    lines = [[line[0], line[2], line[4]] for line in acceptance.lines(rows) if line[4] != "not measured"]
    fill("performance.md", "ratios", lines, about)


def cell(row: report.Row | None, more: str = "") -> str:
    """Return milliseconds of both passes and of the forward pass, and more fields of a row."""
    figures = {name: figure(x) for name, x in (row or {}).items() if isinstance(x, float)}
    return ("{both_ms} ({forward_ms}" + more + ")").format(**figures) if row else "-"


def figure(number: float) -> str:
    """Return a number with two or three digits."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def rows_of_case(case: str) -> list[report.Row]:
    return [row for row in measurements(case) if row["case"] == case]


def fill_pages() -> None:
    fill_tables(measurements("diagonal_ssm"))
    fill_models(rows_of_case("encoders"), rows_of_case("decoding"))
    results = DOCS.parent / "benchmarks" / "results"
    for name, table in papers.TABLES.items():
        rows = report.read(results / f"{name}.json")
        fill("performance.md", name, papers.make_lines(table, table.lengths, rows), f"One core, {describe(rows)}")
    scores = json.loads((results / f"{papers.FIGURE6}.json").read_text(encoding="utf-8"))
    about = f"Test split, {scores['processor']}, {scores['date'][:10]}"
    fill("results.md", papers.FIGURE6, papers.make_lines_of_biases(scores["scores"], scores["metric"]), about)


if __name__ == "__main__":
    fill_pages()
    draw_operators(measurements("diagonal_ssm"))
    draw_performance(rows_of_case("encoders"), rows_of_case("decoding"))
    draw_results()
