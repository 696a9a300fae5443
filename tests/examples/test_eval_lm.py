"""eval_lm.py and generate_lm.py read text as run_clm.py did, and generate text of any length in constant memory."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot
from transformers import AutoConfig, AutoTokenizer
from transformers.generation import stopping_criteria

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.training.tokenizers import train_characters
from tests.docs.blocks import ROOT
from tests.examples.contract import CHUNKS as MEGA
from tests.examples.runs import TINY, assert_error

LINES = ["to be or not to be", "that is the question"] * 40


@pytest.fixture
def trained(call, tmp_path):
    """Return a function that trains a model, and returns its folder and its metrics."""
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "validation"):
        (data / f"{split}.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")

    def run(*options: object) -> tuple[Path, dict]:
        model = ["--config_overrides", MEGA, "--block_size", 16, "--max_steps", 3, "--learning_rate", 0.05]
        paths = ["--dataset_path", data, "--output_dir", tmp_path / "out"]
        return tmp_path / "out", call("run_clm", *paths, "--do_train", "--do_eval", *model, *options)

    return run


@pytest.fixture
def evaluate(script, tmp_path):
    """Return a function that runs eval_lm.py, and returns the loss of each context."""

    def run(model: Path, *options: object) -> dict[int, float]:
        paths = [
            "--model_name_or_path",
            model,
            "--dataset_path",
            tmp_path / "data",
            "--output_dir",
            tmp_path / "scores",
        ]
        rows = script("eval_lm").main([*map(str, [*paths, "--device", "cpu", *options])])
        return {row["context"]: row["loss"] for row in rows}

    return run


SCRIPTS = ("run_clm", "generate_lm", "eval_lm")
SETTINGS = {
    "characters": ["--tokenization", "char", "--line_end", "newline", "--validation_share", 0.1],
    "bytes": ["--tokenization", "byte", "--line_end", "newline"],
    "words": ["--tokenization", "word", "--line_end", "eos", "--validation_share", 0.3, "--eval_context", 40],
}


@pytest.mark.parametrize("case", SETTINGS)
def test_evaluation_equals_that_of_the_training(trained, evaluate, tmp_path, case):
    model, metrics = trained(*SETTINGS[case])
    context = 40 if "--eval_context" in SETTINGS[case] else 8192
    losses = evaluate(model)
    assert losses[context] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    assert sorted(losses) == sorted({128, 512, 2048, 8192, context})
    evaluate(model, "--eval_context", 16, 64, "--chunk_size", 8, 12, "--eval_segment", 16)
    scores = json.loads((tmp_path / "scores" / "scores.json").read_text(encoding="utf-8"))
    assert [(row["chunk"], row["context"]) for row in scores] == [(8, 16), (8, 64), (12, 16), (12, 64)]


def test_options_replace_settings(trained, evaluate, capsys):
    model, metrics = trained(*SETTINGS["characters"])
    assert "evaluating" not in capsys.readouterr().out
    evaluate(model, "--eval_context", 64)
    assert "evaluating the last 0.1 of the split train, as in the training" in capsys.readouterr().out
    loss = evaluate(model, "--eval_context", 64, "--line_end", "eos", "--split", "validation")[64]
    printed = capsys.readouterr().out
    assert "--line_end eos is used, although the model was trained with newline" in printed
    assert "evaluating the last" not in printed and loss != pytest.approx(metrics["eval_loss"], rel=1e-3)
    evaluate(model, "--eval_context", 64, "--split", "train")
    assert "--split train contains the text of the training; pass --last_share 0.1" in capsys.readouterr().out


def test_further_training_keeps_the_settings(trained, call, tmp_path, capsys):
    model, _ = trained(*SETTINGS["characters"])
    options = ["--model_name_or_path", model, "--dataset_path", tmp_path / "data", "--output_dir", tmp_path / "more"]
    capsys.readouterr()
    call("run_clm", *options, "--do_eval", "--do_train", "--max_steps", 1, "--block_size", 16, "--tokenization", "word")
    assert "--tokenization word is not used, because the tokenizer is loaded" in capsys.readouterr().out
    stored = AutoTokenizer.from_pretrained(tmp_path / "more").init_kwargs["language_modeling"]
    assert stored == {
        "line_end": "newline", "text_column": "text", "validation_share": 0.0, "eval_context": 8192,
        "eval_segment": 1024, "tokenization": "char",
    }  # fmt: skip


def test_generation_prints_and_reads_lines(trained, script, tmp_path, monkeypatch):
    """`</s>` is a newline in the text and in the prompt."""
    model, _ = trained("--tokenization", "word", "--line_end", "eos")
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = script("generate_lm").lib.language_modeling
    prompt = lm.encode_prompt("to be\n or", tokenizer, "eos")
    assert prompt.tolist() == [tokenizer.convert_tokens_to_ids(["to", "be", "</s>", "or"])]
    continued = tokenizer.convert_tokens_to_ids(["not", "</s>", "to", "</s>", "</s>", "be"])

    def generate(self, prompt, *, streamer, **options):
        streamer.cache = None
        for token in (prompt, *prompt.new_tensor(continued)):
            streamer.put(token)
        streamer.end()

    monkeypatch.setattr("luna_mega.MegaForCausalLM.generate", generate)
    options = ["--model_name_or_path", model, "--prompt", "to be\n or", "--output_dir", tmp_path / "text"]
    script("generate_lm").main([*map(str, options), "--device", "cpu"])
    assert (tmp_path / "text" / "text.txt").read_text(encoding="utf-8") == "to be\nor not\nto\n\nbe"


def test_lengths_of_a_model_with_positions(trained, evaluate, script, tmp_path, capsys):
    """By default, contexts and generated texts have at most the positions of the model."""
    luna = ["--model_type", "luna", "--config_overrides", TINY, "--tokenization", "char", "--line_end", "newline"]
    model, metrics = trained(*luna)
    assert "--eval_context 8192 is reduced to 16, because the model has 16 positions" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(model).model_max_length == 16
    assert evaluate(model) == {16: pytest.approx(metrics["eval_loss"], rel=1e-6)}
    assert "--eval_context [16, 128, 512, 2048, 8192] is reduced to [16]" in capsys.readouterr().out
    options = ["--model_name_or_path", model, "--prompt", "to be", "--output_dir", tmp_path / "text"]
    script("generate_lm").main([*map(str, options), "--device", "cpu", "--temperature", "0"])
    assert "--max_new_tokens 1000 is reduced to 12" in capsys.readouterr().out
    assert len((tmp_path / "text" / "text.txt").read_text(encoding="utf-8")) <= 17


def test_ticks_are_numbers(script, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr(pyplot, "close", lambda *_: None)
    rows = [{"chunk": chunk, "context": context, "perplexity": 2.5} for chunk in (128, 256) for context in (128, 512)]
    script("eval_lm").plot(rows, tmp_path / "context.png")
    (figure,) = figures
    figure.draw_without_rendering()
    labels = [[label.get_text() for label in axes.get_xticklabels()] for axes in figure.axes]
    assert labels == [["128", "512"], ["128", "256"]]
    texts = [label.get_text() for axes in figure.axes for label in axes.get_xticklabels(which="both")]
    assert not any("$" in text for text in texts)


def test_commands_on_the_page(script, call, tmp_path, monkeypatch):
    """The commands of docs/pretraining.md run after each other, with a smaller recipe."""
    text = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = {name: re.search(rf"examples/{name}\.py (.*outputs/shakespeare.*)", text)[1] for name in SCRIPTS}
    words = {name: shlex.split(command) for name, command in commands.items()}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / "train.txt").write_text("\n".join(LINES), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    small = ["--config_overrides", MEGA, "--max_steps", 2, "--bf16", "false", "--save_strategy", "no"]
    metrics = call("run_clm", *small, "--eval_strategy", "no", *words["run_clm"])
    script("generate_lm").main([*words["generate_lm"], "--max_new_tokens", "20", "--device", "cpu"])
    script("eval_lm").main([*words["eval_lm"], "--device", "cpu"])
    (scores,) = (tmp_path / "outputs").glob("*/scores.json")
    losses = {row["context"]: row["loss"] for row in json.loads(scores.read_text(encoding="utf-8"))}
    assert losses[8192] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    assert AutoConfig.from_pretrained(tmp_path / "outputs" / "shakespeare").model_type == "mega"


FIELDS = {"hidden_size": 16, "num_hidden_layers": 2, "shared_representation_size": 8, "initializer_range": 0.2}
CHUNKS = {"use_chunking": True, "chunk_size": 8}


@pytest.fixture
def generate(script, tmp_path):
    """Return a function that runs the script with an untrained character model and returns its reports and text."""
    tokenizer = train_characters(["abcdefgh \n"])
    tokenizer.save_pretrained(tmp_path / "model")

    def run(*options, **fields):
        config = MegaConfig(vocab_size=len(tokenizer), is_decoder=True, bidirectional=False, **FIELDS | fields)
        MegaForCausalLM(config).save_pretrained(tmp_path / "model")
        paths = ["--model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "text"]
        reports = script("generate_lm").main([*map(str, [*paths, "--prompt", "ab", "--device", "cpu", *options])])
        return reports, (tmp_path / "text" / "text.txt").read_text(encoding="utf-8")

    return run


@pytest.mark.parametrize(
    "sampling",
    [["--temperature", "0"], pytest.param(["--top_k", "3"], marks=pytest.mark.slow)],
    ids=["greedy", "sampled"],
)
def test_constant_memory(generate, tmp_path, sampling, capsys):
    rows, text = generate("--max_new_tokens", "200", "--report_every", "20", *sampling, **CHUNKS)
    assert json.loads((tmp_path / "text" / "speed.json").read_text(encoding="utf-8")) == rows
    assert [row["tokens"] for row in rows] == list(range(20, 201, 20))
    assert len({row["cache_bytes"] for row in rows}) == 1 and rows[0]["cache_bytes"] > 0
    assert all(row["tokens_per_second"] > 0 for row in rows)
    output = capsys.readouterr()
    assert text in output.out and "cache_bytes" in output.err
    assert text.startswith("ab") and len(text) > 100 and set(text) <= set("abcdefgh \n")


def test_without_chunks_the_cache_grows(generate):
    rows, _ = generate("--max_new_tokens", "120", "--report_every", "20")
    assert rows[-1]["cache_bytes"] > 2 * rows[0]["cache_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_new_tokens", "0"], "must be at least 1"),
        (["--temperature", "-1"], "must be at least 0"),
        (["--prompt", ""], "has no tokens"),
        (["--model_name_or_path", "absent"], "error: "),
    ],
)
def test_errors_of_generation(generate, options, message):
    assert_error(generate, message, *options)


def test_note_about_the_length(monkeypatch):
    """Texts of models without a limit do not contain the note of transformers that it is exceeded."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "shared_representation_size": 8}
    sizes |= {"nffn_hidden_size": 16, "ema_projection_size": 2, "vocab_size": 20, "max_positions": 8}
    model = MegaForCausalLM(MegaConfig(is_decoder=True, **sizes)).eval()
    notes: list[str] = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", notes.append)
    model.generate(torch.full((1, 7), 5), max_new_tokens=4, eos_token_id=None)
    assert not notes
