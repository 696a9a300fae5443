"""Show a Luna, Mega or Megalodon in the browser: the task of the model, and a plot of its attention weights.

    pip install gradio matplotlib
    python examples/space/app.py FOLDER

As a Hugging Face Space, the page loads the repository of the variable MODEL. See docs/hub.md.
"""

import argparse
import os
from contextlib import suppress

import gradio
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, Pipeline, pipeline

with suppress(ImportError):  # the folder contains the code of its model
    import luna_mega  # noqa: F401

TEXT = "The quick brown fox jumps over the lazy dog."
CLASSES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "text-generation",
}
OPTIONS = {
    "fill-mask": {"top_k": 8},
    "text-classification": {"top_k": None, "truncation": True},
    "text-generation": {"max_new_tokens": 50, "do_sample": False},
}
LONGEST = 128  # number of tokens that are plotted


def load(name: str) -> Pipeline:
    """Return the pipeline of a model folder or a repository on the Hub."""
    architecture = (AutoConfig.from_pretrained(name, trust_remote_code=True).architectures or ["None"])[0]
    for ending, task in CLASSES.items():
        if architecture.endswith(ending):
            return pipeline(task, name, trust_remote_code=True)
    raise SystemExit(f"error: {name} contains a {architecture}; use a model of {', '.join(CLASSES)}")


@torch.no_grad()
def attention_weights(run: Pipeline, text: str, layer: int) -> tuple[list[str], torch.Tensor]:
    """Return the tokens of a text and their attention weights in a layer, averaged over the heads.

    The weights are `[T, rows of P]` for Luna (unpack), and `[T, T]` for Mega and Megalodon, 0 between chunks.
    """
    inputs = run.tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
    ids = inputs["input_ids"].to(run.device)
    weights = run.model.base_model(ids, output_attentions=True).attentions[layer - 1][0].float().cpu()
    if run.model.config.model_type != "mega":  # which has a single head
        weights = weights.mean(0)
    if run.model.config.model_type != "luna":  # the last chunk is padded
        weights = torch.block_diag(*weights)[: ids.shape[1], : ids.shape[1]]
    return [run.tokenizer.decode([token]) for token in ids[0].tolist()], weights


def make_task(run: Pipeline) -> gradio.Interface:
    """Return the tab of the task. `Interface.from_pipeline` of gradio 6.31 does not support transformers 5."""
    text = TEXT.replace("lazy", run.tokenizer.mask_token) if run.task == "fill-mask" else TEXT
    writes, key = run.task == "text-generation", "token_str" if run.task == "fill-mask" else "label"

    def answer(text: str) -> str | dict[str, float]:
        rows = run(text, **OPTIONS[run.task])
        return rows[0]["generated_text"] if writes else {row[key]: row["score"] for row in rows}

    output = gradio.Textbox(label="Generated text") if writes else gradio.Label(label="Scores")
    return gradio.Interface(answer, gradio.Textbox(text, label="Text"), output, flagging_mode="never", api_name="task")


def make_attention(run: Pipeline) -> gradio.Interface:
    """Return the tab with the plot of the attention weights."""
    is_luna, layers = run.model.config.model_type == "luna", run.model.config.num_hidden_layers

    def plot(text: str, layer: int) -> Figure:
        tokens, weights = attention_weights(run, text, layer)
        figure = Figure(figsize=(9, 2 + 0.18 * len(tokens)), layout="constrained")
        axes = figure.add_subplot()
        figure.colorbar(axes.imshow(weights, cmap="Blues", aspect="auto", vmin=0), label="weight")
        axes.set_yticks(range(len(tokens)), [repr(token)[1:-1] for token in tokens], fontsize=8, parse_math=False)
        axes.set(xlabel="row of P" if is_luna else "position of the key", ylabel="token")
        return figure

    inputs = [gradio.Textbox(TEXT, label="Text"), gradio.Slider(1, layers, 1, step=1, label="Layer")]
    output = gradio.Plot(label="Unpack weights" if is_luna else "Attention weights")
    return gradio.Interface(plot, inputs, output, flagging_mode="never", api_name="attention")


def make_page(name: str) -> gradio.TabbedInterface:
    """Return the page of a model."""
    run = load(name)
    tabs = {run.task: make_task(run), "attention": make_attention(run)}
    return gradio.TabbedInterface(list(tabs.values()), list(tabs), title=type(run.model).__name__)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Page of a Luna, Mega or Megalodon in the browser.")
    default = os.environ.get("MODEL")
    nargs = "?" if default else None
    parser.add_argument("model", nargs=nargs, default=default, help="model folder, or repository on the Hub")
    make_page(parser.parse_args(argv).model).launch(show_error=True)


if __name__ == "__main__":
    main()
