"""Gradio page of `luna-mega demo`, and the Hugging Face Space that shows it."""

import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from huggingface_hub import SpaceCard, SpaceCardData

import luna_mega
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
_LAGS = 128


class _NoUploads:
    """Middleware that disables the upload endpoint of gradio, because these pages have no file inputs."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload"):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this page does not accept files"})
        else:
            await self.app(scope, receive, send)


# Options of the FastAPI application: class, arguments and options of each middleware.
WITHOUT_UPLOADS = {"middleware": [(_NoUploads, (), {})]}


def serve(folder: str | Path, host: str | None = None, port: int | None = None) -> None:
    """Serve the page of a model folder until the process is interrupted.

    Args:
        folder: Model folder with its tokenizer.
        host: Address to listen on; None means 127.0.0.1.
        port: Port to listen on; None means the first free port from 7860.

    Raises:
        ConversionError: If gradio is not installed, the folder is invalid, or the port is in use.
    """
    page = build_page(folder)
    try:
        page.launch(server_name=host, server_port=port, app_kwargs=WITHOUT_UPLOADS)
    except OSError as error:
        raise ConversionError(f"{error}; use another --port") from error


def write_space(folder: str | Path, output: str | Path) -> list[str]:
    """Write a Hugging Face Space that shows the page of a model folder, with this package and a copy of the model.

    Args:
        folder: Model folder with its tokenizer.
        output: Folder to write, absent or empty.

    Returns:
        Names of the files and folders in `output`.

    Raises:
        ConversionError: If gradio is not installed, `folder` is invalid, or `output` is not empty.
    """
    gradio, demo = _gradio(), Demo(folder)
    card = SpaceCardData(title=one_line(demo.name), sdk="gradio", sdk_version=gradio.__version__, app_file="app.py")
    with complete_folder(check_output(output)) as space:
        (space / "app.py").write_text(_APP, encoding="utf-8")
        versions = {module.__name__: module.__version__.partition("+")[0] for module in (torch, transformers)}
        requirements = "".join(f"{name}=={version}\n" for name, version in versions.items())
        (space / "requirements.txt").write_text(requirements, encoding="utf-8")
        _copy_package(space / "luna_mega")
        text = f"# {markdown(demo.name)}\n\nDemo of a `{demo.model_class}`, written by `luna-mega demo --space`."
        SpaceCard(f"---\n{card.to_yaml()}\n---\n\n{text}\n").save(space / "README.md")
        (space / "model").mkdir()
        copy_model(folder, space / "model")
    return ["app.py", "requirements.txt", "README.md", "luna_mega", "model"]


def _copy_package(output: Path) -> None:
    """Copy this package, which is not on a package index, from an installation or a checkout."""
    package, *roots = map(Path, luna_mega.__path__)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, output, ignore=ignore)
    for name in {name.split(".")[1] for name in sys.modules if name.startswith("luna_mega.")}:
        for folder in (root / name for root in roots):
            if folder.is_dir() and not (output / name).exists():
                shutil.copytree(folder, output / name, ignore=ignore)


def build_page(folder: str | Path):
    """Return the page of a model folder as `gradio.Blocks`.

    Args:
        folder: Model folder with its tokenizer.

    Raises:
        ConversionError: If gradio is not installed, or the folder is invalid.
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


@contextmanager
def _errors(gradio):
    """Convert a `ValueError` to an error on the page; also a decorator."""
    try:
        yield
    except ValueError as error:
        raise gradio.Error(str(error), print_exception=False) from error


def _add_task(gradio, demo: Demo) -> None:
    if demo.task in ("fill-mask", "text-classification"):
        mask = demo.tokenizer.mask_token if demo.task == "fill-mask" else None
        label = "Text" if mask is None else f"Text with one {mask}"
        text = gradio.Textbox(_EXAMPLE if mask is None else _EXAMPLE.replace("lazy", mask), label=label, lines=3)
        button = gradio.Button(_TITLES[demo.task], variant="primary")
        scores = gradio.Label(label="Scores", num_top_classes=8)
        button.click(_errors(gradio)(demo.score), text, scores, api_name="score")
        return
    text = gradio.Textbox(_EXAMPLE, label="Text", lines=3)
    with gradio.Row():
        longest = gradio.Slider(1, 1000, 100, step=1, label="Maximum number of new tokens")
        temperature = gradio.Slider(0, 2, 0, step=0.1, label="Temperature (0 for greedy decoding)")
    with gradio.Row():
        button, stop = gradio.Button(_TITLES[demo.task], variant="primary"), gradio.Button("Stop")
    written = gradio.Textbox(label="Generated text", lines=8)

    def write(*arguments):
        with _errors(gradio):
            yield from demo.write(*arguments)

    running = button.click(write, [text, longest, temperature], written, api_name="write")
    stop.click(None, cancels=running, api_name=False)


def _add_luna(gradio, demo: Demo) -> None:
    config = demo.body.config
    packs = demo.has_pack_weights
    gradio.Markdown(
        "P is a short packed sequence. "
        + ("Its rows attend to the tokens (**pack**), and the" if packs else "The")
        + " tokens attend to the rows of P (**unpack**). The darkest color is the largest weight of the text. "
        + f"Only the first {LONGEST} tokens are shown."
    )
    text = gradio.Textbox(_EXAMPLE, label="Text", lines=3)
    with gradio.Row():
        layer = _layers(gradio, config)
        row = gradio.Slider(1, config.projection_length, 1, step=1, label="Row of P")
    button = gradio.Button("Show", variant="primary")
    packed = _marked(gradio, "Pack weights of the row for each token", packs)
    read = _marked(gradio, "Unpack weights of each token for the row")
    with gradio.Row():
        pack = _image(gradio, "Pack weights (vertical: rows of P, horizontal: tokens)", packs)
        unpack = _image(gradio, "Unpack weights (vertical: tokens, horizontal: rows of P)")
    token = gradio.Slider(1, LONGEST, 1, step=1, label="Token", visible=packs)
    through = _marked(gradio, "Weights of this token for all tokens, through P", packs)

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
    window = "all tokens" if chunk is None else f"the tokens of its chunk of {chunk}"
    heads = getattr(config, "num_attention_heads", 1)
    shown = "One head" if heads == 1 else f"Mean of {heads} heads"
    gradio.Markdown(
        f"{shown}. A token attends to {window}{' up to itself' if config.is_decoder else ''}. The darkest color is the "
        f"largest weight. Only the first {LONGEST} tokens are shown."
    )
    text = gradio.Textbox(_EXAMPLE, label="Text", lines=3)
    with gradio.Row():
        layer = _layers(gradio, config)
        token = gradio.Slider(1, LONGEST, 1, step=1, label="Token")
    button = gradio.Button("Show", variant="primary")
    marked = _marked(gradio, "Weights of this token for all tokens")
    image = _image(gradio, "Attention weights (vertical: queries, horizontal: keys)")

    def show_token(text, layer, token):
        weights = demo.look(text)
        return _marks(weights.tokens, weights.attention[int(layer) - 1, min(int(token), len(weights.tokens)) - 1])

    def show_all(text, layer):
        weights = demo.look(text)
        return _pixels(weights.attention[int(layer) - 1]), gradio.update(maximum=len(weights.tokens))

    _draw(gradio, show_token, [text, layer, token], marked, [button.click, layer.release, token.release])
    _draw(gradio, show_all, [text, layer], [image, token], [button.click, layer.release])


def _add_moving_average(gradio, demo: Demo) -> None:
    import pandas

    config = demo.body.config
    gradio.Markdown(
        "The moving average of a layer is a convolution. The kernel of a channel contains the weight of a token at "
        "each distance; channels whose kernel decays slowly remember longer."
    )
    with gradio.Row():
        layer = _layers(gradio, config)
        channel = gradio.Slider(1, config.hidden_size, 1, step=1, label="Channel")
    chart = gradio.LinePlot(
        x="distance",
        y="weight",
        color="direction",
        title="Kernel of the channel",
        height=380,
        x_title="distance (tokens)",
    )
    image = _image(
        gradio,
        f"Absolute values of all kernels (vertical: channels, longest memory first; horizontal: {_LAGS} distances)",
    )

    def show_kernels(layer, channel):
        kernels = demo.kernels(int(layer) - 1, _LAGS)
        rows = [
            pandas.DataFrame({"distance": range(_LAGS), "weight": kernel[int(channel) - 1].tolist(), "direction": name})
            for name, kernel in zip(("past", "future"), kernels, strict=False)
        ]
        sizes = torch.cat(list(kernels.abs()))
        sizes = sizes / sizes.amax(dim=1, keepdim=True).clamp_min(1e-30)
        return pandas.concat(rows), _pixels(sizes[sizes.sum(1).argsort(descending=True)])

    _draw(gradio, show_kernels, [layer, channel], [chart, image], [layer.release, channel.release])
    gradio.on(None, _errors(gradio)(show_kernels), [layer, channel], [chart, image], api_name=False)


def _layers(gradio, config):
    return gradio.Slider(
        1, config.num_hidden_layers, 1, step=1, label="Layer", interactive=config.num_hidden_layers > 1
    )


def _marked(gradio, label: str, visible: bool = True):
    return gradio.HighlightedText(label=label, combine_adjacent=False, show_legend=False, visible=visible)


def _image(gradio, label: str, visible: bool = True):
    with gradio.Column(visible=visible, min_width=280):
        gradio.Markdown(label)
        return gradio.Image(
            show_label=False, format="png", interactive=False, height=360, buttons=["download", "fullscreen"]
        )


def _draw(gradio, function, inputs, outputs, events) -> None:
    gradio.on(events, _errors(gradio)(function), inputs, outputs, api_name=function.__name__, show_progress="hidden")


def _marks(tokens: list[str], weights: torch.Tensor) -> list[tuple[str, float]]:
    """Return tokens with their weights, scaled so that the largest weight is 1."""
    return list(zip(tokens, (weights / weights.max().clamp_min(1e-30)).tolist(), strict=True))


def _pixels(weights: torch.Tensor):
    """Return a matrix as a grayscale image; large weights are dark, and each element is a square of pixels."""
    shade = 1.0 - (weights / weights.max().clamp_min(1e-30)).clamp(0, 1)
    size = max(1, 720 // max(weights.shape))
    return (shade * 255).byte().repeat_interleave(size, 0).repeat_interleave(size, 1).numpy()
