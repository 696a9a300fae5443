"""The page of `luna-mega demo`, in gradio, and the Space that shows it on the Hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import SpaceCard, SpaceCardData

from luna_mega.demo.views import LONGEST, Demo
from luna_mega.errors import ConversionError, install
from luna_mega.escaping import markdown, one_line
from luna_mega.hub.files import copy_model
from luna_mega.hub.output import check_output, complete_folder

_EXAMPLE = "The quick brown fox jumps over the lazy dog."
_TITLES = {
    "fill-mask": "Fill the mask",
    "text-classification": "Classify",
    "text-generation": "Write",
    "translation": "Translate",
}
_APP = '''"""The page of `luna-mega demo` as a Hugging Face Space."""

from pathlib import Path

from luna_mega.demo.page import serve

serve(Path(__file__).parent / "model")
'''
_REQUIREMENTS = """# Or, for another version: luna-mega[demo] @ git+https://...
luna-mega[demo]
"""
_LAGS = 128


class _NoUploads:
    """The application without the place that takes files: gradio has one, and these pages show none."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload"):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this page takes no files"})
        else:
            await self.app(scope, receive, send)


# For FastAPI, on which gradio stands: class, arguments and options of each middleware.
WITHOUT_UPLOADS = {"middleware": [(_NoUploads, (), {})]}


def serve(folder: str | Path, host: str | None = None, port: int | None = None) -> None:
    """Show the page of a model folder until the process is interrupted.

    Raises:
        ConversionError: gradio is not installed, the folder is at fault, or the port is taken.
    """
    page = build_page(folder)
    try:
        page.launch(server_name=host, server_port=port, app_kwargs=WITHOUT_UPLOADS)
    except OSError as error:
        raise ConversionError(f"{error}; give another --port") from error


def write_space(folder: str | Path, output: str | Path) -> list[str]:
    """Write a Hugging Face Space that shows the page of a model folder: its code, its card and a copy of the model.

    Returns:
        Names of what was written.

    Raises:
        ConversionError: gradio is not installed, `folder` is at fault, or `output` is neither absent nor empty.
    """
    gradio, demo = _gradio(), Demo(folder)
    card = SpaceCardData(title=one_line(demo.name), sdk="gradio", sdk_version=gradio.__version__, app_file="app.py")
    with complete_folder(check_output(output)) as space:
        (space / "app.py").write_text(_APP, encoding="utf-8")
        (space / "requirements.txt").write_text(_REQUIREMENTS, encoding="utf-8")
        text = f"# {markdown(demo.name)}\n\n`{demo.model_class}` on the page of `luna-mega demo`."
        SpaceCard(f"---\n{card.to_yaml()}\n---\n\n{text}\n").save(space / "README.md")
        (space / "model").mkdir()
        copy_model(folder, space / "model")
    return ["app.py", "requirements.txt", "README.md", "model"]


def build_page(folder: str | Path):
    """Return the page of a model folder, a `gradio.Blocks`.

    Raises:
        ConversionError: gradio is not installed, or the folder is at fault.
    """
    gradio, demo = _gradio(), Demo(folder)
    with gradio.Blocks(title=one_line(demo.name), analytics_enabled=False) as page:
        gradio.Markdown(f"# {markdown(demo.name)}\n`{demo.model_class}`, {demo.model.num_parameters():,} parameters")
        with gradio.Tab(_TITLES[demo.task]):
            _add_task(gradio, demo)
        if demo.is_luna:
            with gradio.Tab("Pack and unpack"):
                _add_luna(gradio, demo)
        else:
            with gradio.Tab("Attention"):
                _add_attention(gradio, demo)
            with gradio.Tab("Moving average"):
                _add_moving_average(gradio, demo)
    return page


def _gradio():
    try:
        import gradio
    except ImportError as error:
        raise ConversionError(f"gradio cannot be imported ({error}); run {install('demo')}") from error
    return gradio


def _told(gradio, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its errors about the input shown on the page."""

    def call(*arguments):
        try:
            return function(*arguments)
        except ValueError as error:
            raise gradio.Error(str(error), print_exception=False) from error

    return call


def _add_task(gradio, demo: Demo) -> None:
    if demo.task in ("fill-mask", "text-classification"):
        mask = demo.tokenizer.mask_token if demo.task == "fill-mask" else None
        label = "Text" if mask is None else f"Text, with {mask} where a word is missing"
        text = gradio.Textbox(_EXAMPLE if mask is None else _EXAMPLE.replace("lazy", mask), label=label, lines=3)
        button = gradio.Button(_TITLES[demo.task], variant="primary")
        scores = gradio.Label(label="Scores", num_top_classes=8)
        button.click(_told(gradio, demo.score), text, scores, api_name="score")
        return
    text = gradio.Textbox(_EXAMPLE, label="Text", lines=3)
    with gradio.Row():
        longest = gradio.Slider(1, 1000, 100, step=1, label="Tokens to write, at most")
        temperature = gradio.Slider(0, 2, 0, step=0.1, label="Temperature (0 = the likeliest token)")
    with gradio.Row():
        button, stop = gradio.Button(_TITLES[demo.task], variant="primary"), gradio.Button("Stop")
    written = gradio.Textbox(label="Written", lines=8)

    def write(*arguments):
        try:
            yield from demo.write(*arguments)
        except ValueError as error:
            raise gradio.Error(str(error), print_exception=False) from error

    running = button.click(write, [text, longest, temperature], written, api_name="write")
    stop.click(None, cancels=running, api_name=False)


def _add_luna(gradio, demo: Demo) -> None:
    config = demo.body.config
    packs = not config.is_decoder
    gradio.Markdown(
        "P is a short sequence of rows. "
        + ("Every row takes from the tokens (**pack**), and every" if packs else "Every")
        + " token reads from the rows (**unpack**). Darker is more; the darkest of a text is its largest weight. "
        + f"The first {LONGEST} tokens are shown."
    )
    text = gradio.Textbox(_EXAMPLE, label="Text", lines=3)
    with gradio.Row():
        layer = _layers(gradio, config)
        row = gradio.Slider(1, config.projection_length, 1, step=1, label="Row of P")
    button = gradio.Button("Show", variant="primary")
    packed = _marked(gradio, "Pack: what the row takes from each token", packs)
    read = _marked(gradio, "Unpack: what each token reads from the row")
    with gradio.Row():
        pack = _picture(gradio, "Pack weights: rows of P down, tokens across", packs)
        unpack = _picture(gradio, "Unpack weights: tokens down, rows of P across")
    token = gradio.Slider(1, LONGEST, 1, step=1, label="Token", visible=packs)
    through = _marked(gradio, "Weights of all tokens for this one, through P", packs)

    def show_rows(text, layer, row):
        weights = demo.look(text)
        count = gradio.update(maximum=len(weights.tokens))
        layer, row = int(layer) - 1, min(int(row), weights.unpack.shape[3]) - 1
        unpacked = weights.unpack[layer].mean(0)
        marks = _marks(weights.tokens, unpacked[:, row])
        if not packs:
            return None, marks, None, _pixels(unpacked), count
        mean = weights.pack[layer].mean(0)
        return _marks(weights.tokens, mean[row]), marks, _pixels(mean), _pixels(unpacked), count

    def show_token(text, layer, token):
        weights = demo.look(text)
        return _marks(weights.tokens, weights.through(int(layer) - 1, min(int(token), len(weights.tokens)) - 1))

    shown = [packed, read, pack, unpack, token]
    _draw(gradio, show_rows, [text, layer, row], shown, [button.click, layer.release, row.release])
    if packs:
        events = [button.click, layer.release, token.release]
        _draw(gradio, show_token, [text, layer, token], through, events)


def _add_attention(gradio, demo: Demo) -> None:
    config = demo.body.config
    chunk = config.attention_chunk
    reach = "all tokens" if chunk is None else f"the tokens of its own chunk of {chunk}"
    heads = getattr(config, "num_attention_heads", 1)
    who = "One head" if heads == 1 else f"The mean of {heads} heads"
    gradio.Markdown(
        f"{who}; a token attends to {reach}{' before it' if config.is_decoder else ''}. Darker is more; the darkest "
        f"is the largest weight. The first {LONGEST} tokens are shown."
    )
    text = gradio.Textbox(_EXAMPLE, label="Text", lines=3)
    with gradio.Row():
        layer = _layers(gradio, config)
        token = gradio.Slider(1, LONGEST, 1, step=1, label="Token")
    button = gradio.Button("Show", variant="primary")
    marked = _marked(gradio, "Weights of all tokens for this one")
    picture = _picture(gradio, "Attention weights: tokens down, the tokens they read across")

    def show_token(text, layer, token):
        weights = demo.look(text)
        return _marks(weights.tokens, weights.attention[int(layer) - 1, min(int(token), len(weights.tokens)) - 1])

    def show_all(text, layer):
        weights = demo.look(text)
        return _pixels(weights.attention[int(layer) - 1]), gradio.update(maximum=len(weights.tokens))

    _draw(gradio, show_token, [text, layer, token], marked, [button.click, layer.release, token.release])
    _draw(gradio, show_all, [text, layer], [picture, token], [button.click, layer.release])


def _add_moving_average(gradio, demo: Demo) -> None:
    import pandas

    config = demo.body.config
    gradio.Markdown(
        "The moving average of a layer is a convolution: each channel has a kernel, the weights of the tokens at each "
        "distance. Slow decay is a long memory."
    )
    with gradio.Row():
        layer = _layers(gradio, config)
        channel = gradio.Slider(1, config.hidden_size, 1, step=1, label="Channel")
    chart = gradio.LinePlot(
        x="distance", y="weight", color="direction", title="Kernel of the channel", height=380, x_title="tokens away"
    )
    picture = _picture(
        gradio, f"Size of all kernels: channels down, longest memory first; 0 to {_LAGS - 1} tokens across"
    )

    def show_kernels(layer, channel):
        kernels = demo.kernels(int(layer) - 1, _LAGS)
        rows = [
            pandas.DataFrame({"distance": range(_LAGS), "weight": kernel[int(channel) - 1].tolist(), "direction": name})
            for name, kernel in zip(("back", "ahead"), kernels, strict=False)
        ]
        sizes = torch.cat(list(kernels.abs()))
        sizes = sizes / sizes.amax(dim=1, keepdim=True).clamp_min(1e-30)
        return pandas.concat(rows), _pixels(sizes[sizes.sum(1).argsort(descending=True)])

    _draw(gradio, show_kernels, [layer, channel], [chart, picture], [layer.release, channel.release])
    gradio.on(None, _told(gradio, show_kernels), [layer, channel], [chart, picture], api_name=False)


def _layers(gradio, config):
    return gradio.Slider(
        1, config.num_hidden_layers, 1, step=1, label="Layer", interactive=config.num_hidden_layers > 1
    )


def _marked(gradio, label: str, visible: bool = True):
    return gradio.HighlightedText(label=label, combine_adjacent=False, show_legend=False, visible=visible)


def _picture(gradio, label: str, visible: bool = True):
    with gradio.Column(visible=visible, min_width=280):
        gradio.Markdown(label)
        return gradio.Image(
            show_label=False, format="png", interactive=False, height=360, buttons=["download", "fullscreen"]
        )


def _draw(gradio, function, inputs, outputs, events) -> None:
    gradio.on(events, _told(gradio, function), inputs, outputs, api_name=function.__name__, show_progress="hidden")


def _marks(tokens: list[str], weights: torch.Tensor) -> list[tuple[str, float]]:
    """Return tokens with their weights from 0 to 1, the largest weight."""
    return list(zip(tokens, (weights / weights.max().clamp_min(1e-30)).tolist(), strict=True))


def _pixels(weights: torch.Tensor):
    """Return a matrix as a picture, dark where weights are large, each number a square of pixels."""
    shade = 1.0 - (weights / weights.max().clamp_min(1e-30)).clamp(0, 1)
    size = max(1, 720 // max(weights.shape))
    return (shade * 255).byte().repeat_interleave(size, 0).repeat_interleave(size, 1).numpy()
