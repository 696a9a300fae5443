"""run_clm.py, eval_lm.py and generate_lm.py: streams of tokens, scores, settings, and texts of any length."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoTokenizer
from transformers.generation import stopping_criteria

from luna_mega import MegaConfig, MegaForCausalLM, MegalodonConfig, MegalodonForCausalLM
from luna_mega.training import language_modeling
from luna_mega.training.tokenizers import train_characters, train_words
from tests.examples.contract import CHUNKS
from tests.examples.runs import TINY, assert_error, write

LINES = ["to be or not to be", "that is the question"] * 40
FIELDS = {"hidden_size": 16, "num_hidden_layers": 1, "shared_representation_size": 8, "initializer_range": 0.3}
FIELDS |= {"is_decoder": True, "bidirectional": False}


@pytest.mark.parametrize("line_end", ["newline", "eos"])
def test_stream(line_end):
    tokenizer = train_characters(["ab", "\n"])
    stream = language_modeling.encode(["ab", "", " c"], tokenizer, line_end)
    expected = "ab\n\n<unk><unk>\n" if line_end == "newline" else "ab</s><unk></s>"
    assert tokenizer.decode(stream, clean_up_tokenization_spaces=False) == expected


def test_windows_of_an_epoch_have_as_many_tokens_as_the_text():
    windows = language_modeling.draw_windows(torch.arange(30), length=7, seed=0)
    assert len(windows) == 4
    assert all(torch.equal(window["shift_labels"], window["input_ids"] + 1) for window in windows)


def test_blocks_have_random_numbers_of_chunks(script):
    """With `--min_block_size`, as in appendix D.3 of Mega."""
    data = script("run_clm").DataArguments(block_size=24, min_block_size=8)
    draw = script("run_clm").draw_length(data, MegaConfig(use_chunking=True, chunk_size=8))
    numbers = torch.Generator().manual_seed(0)
    assert {int(draw({}, numbers)["length"]) for _ in range(50)} == {8, 16, 24}
    blocks = [{"input_ids": torch.arange(24), "length": torch.tensor(length)} for length in (16, 8)]
    for max_tokens, shape in ((None, (2, 16)), (32, (2, 16)), (31, (1, 16))):
        assert script("run_clm").make_collator(max_tokens)(blocks)["input_ids"].shape == shape


def test_streams_continue_after_the_previous_batch():
    streams = language_modeling.Streams(torch.arange(100), length=7, batch_size=3)
    batches = [[streams[step * 3 + row] for row in range(3)] for step in range(len(streams) // 3)]
    for row in range(3):
        joined = torch.cat([batch[row]["input_ids"] for batch in batches])
        assert torch.equal(joined, torch.arange(33 * row, 33 * row + len(joined)))
        assert all(torch.equal(batch[row]["shift_labels"], batch[row]["input_ids"] + 1) for batch in batches)
    assert [int(batch[0]["step"]) for batch in batches] == [0, 1, 2, 3]


@torch.no_grad()
@given(
    context=st.sampled_from([4, 7, 13, 20, 26, 51, 52, 53, 1000]),
    segment=st.integers(1, 30),
    batch_size=st.integers(1, 4),
)
def test_score(context, segment, batch_size):
    """Evaluation in segments gives the score of complete blocks; every token except the first counts once."""
    torch.manual_seed(0)
    model = MegaForCausalLM(MegaConfig(vocab_size=12, use_chunking=True, chunk_size=4, **FIELDS)).eval()
    stream = torch.randint(3, 12, (53,))
    total = 0.0
    for start in range(0, 52, context):
        block = stream[start : start + context + 1]
        log_probabilities = model(block[None, :-1], torch.ones(1, len(block) - 1)).logits[0].log_softmax(-1)
        total -= log_probabilities.gather(1, block[1:, None]).sum().item()
    result = language_modeling.score_stream(model, stream, context, segment=segment, batch_size=batch_size)
    assert result["loss"] == pytest.approx(total / 52, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_token"] == pytest.approx(result["loss"] / math.log(2))


@pytest.fixture
def train(train) -> Callable[..., tuple[Path, dict]]:
    """Return a function that trains a model, and returns its folder and its metrics."""

    def run(*options: object, output: str = "out") -> tuple[Path, dict]:
        often = ["--do_eval", "--eval_context", 8192, "--max_steps", 3, "--learning_rate", 0.05]
        folder = train(output, "run_clm", *often, *options)
        return folder, json.loads((folder / "all_results.json").read_text(encoding="utf-8"))

    return run


@pytest.fixture
def evaluate(script, tmp_path):
    """Return a function that runs eval_lm.py, and returns the loss of each context."""

    def run(model: Path, *options: object) -> dict[int, float]:
        paths = ["--model_name_or_path", model, "--dataset_path", tmp_path / "data-run_clm", "--device", "cpu"]
        rows = script("eval_lm").main([*map(str, [*paths, "--output_dir", tmp_path / "scores", *options])])
        return {row["context"]: row["loss"] for row in rows}

    return run


ADAPTIVE = ",adaptive_input_cutoffs=[4,5],adaptive_softmax_cutoffs=[4,5],adaptive_input_factor=2"
CHARACTERS = ["--validation_share", 0.1]
SETTINGS = {
    "characters": CHARACTERS,
    "bytes": ["--tokenization", "byte", "--line_end", "newline", "--min_block_size", 8],
    "words": ["--tokenization", "word", "--line_end", "eos", "--validation_share", 0.3, "--eval_context", 40,
              "--config_overrides", CHUNKS + ADAPTIVE],
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_evaluation_equals_that_of_the_training(train, evaluate, tmp_path, case):
    model, metrics = train(*SETTINGS[case])
    context = 40 if "--eval_context" in SETTINGS[case] else 8192
    losses = evaluate(model)
    assert losses[context] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    assert sorted(losses) == sorted({128, 512, 2048, 8192, context})
    evaluate(model, "--eval_context", 16, 64, "--chunk_size", 8, 12, "--eval_segment", 16)
    scores = json.loads((tmp_path / "scores" / "scores.json").read_text(encoding="utf-8"))
    assert [(row["chunk"], row["context"]) for row in scores] == [(8, 16), (8, 64), (12, 16), (12, 64)]


@pytest.mark.slow
def test_figure_of_longer_chunks(script, tmp_path, monkeypatch):
    """A model for each bias and seed is trained once; a simple bias has a table for the chunks of its training only."""
    rows = [{"text": line} for line in LINES]
    for split in ("train", "validation", "test"):
        write(rows, tmp_path / "tiny" / f"{split}.jsonl")
    recipe = {"config_overrides": CHUNKS, "tokenization": "char", "block_size": 16, "max_steps": 1, "do_train": True}
    (tmp_path / "tiny_mega.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    papers, output = script("papers"), tmp_path / "out.json"
    options = ["--data", tmp_path, "--recipe", tmp_path / "tiny_mega.yaml", "--output", output, "--seeds", 0, 1]
    options += ["--biases", "alibi", "simple", "--contexts", 20, "--chunks", 8, 16, "--use_cpu"]
    text = papers.main([*map(str, ["mega-figure6", *options])])
    results = json.loads(output.read_text(encoding="utf-8"))["scores"]
    bits = [row["bits_per_token"] for row in results if (row["bias"], row["chunk"]) == ("alibi", 16)]
    assert len(bits) == 2 and len(results) == 6 and {row["context"] for row in results} == {20}
    cell = f"{sum(bits) / 2:.3f} ± {abs(bits[0] - bits[1]) / math.sqrt(2):.3f}"
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()]
    assert cells[0] == ["bias, context (bits per token)", "chunks of 8", "chunks of 16"]
    assert cells[2][2] == cell and cells[3][0] == "simple, 20" and len(cells[3]) == 2
    monkeypatch.setattr(papers, "run_recipe", None)
    assert papers.main([*map(str, ["mega-figure6", *options])]) == text


def test_label_smoothing(train):
    """The next token is predicted, not the one after it: the text is learned as without smoothing."""
    losses = [
        train("--label_smoothing_factor", factor, "--max_steps", 40, output=str(factor))[1]["eval_loss"]
        for factor in (0, 0.01)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.2)


def test_options_replace_settings(train, evaluate, capsys):
    """Evaluation and further training use the settings of the training, or say that they do not."""
    model, metrics = train(*CHARACTERS)
    evaluate(model, "--eval_context", 64)
    assert "evaluating the last 0.1 of the split train, as in the training" in capsys.readouterr().out
    loss = evaluate(model, "--eval_context", 64, "--line_end", "eos", "--split", "validation")[64]
    printed = capsys.readouterr().out
    assert "--line_end eos is used, although the model was trained with newline" in printed
    assert "evaluating the last" not in printed and loss != pytest.approx(metrics["eval_loss"], rel=1e-4)
    evaluate(model, "--eval_context", 64, "--split", "train")
    assert "--split train contains the text of the training; pass --last_share 0.1" in capsys.readouterr().out
    options = ["--model_name_or_path", model, "--config_overrides", "", "--tokenization", "word", "--max_steps", 1]
    more, _ = train(*options, output="more")
    assert "--tokenization word is not used, because the tokenizer is loaded" in capsys.readouterr().out
    stored = AutoTokenizer.from_pretrained(more).init_kwargs["language_modeling"]
    assert stored == {
        "line_end": "newline", "text_column": "text", "validation_share": 0.0, "eval_context": 8192,
        "eval_segment": 1024, "tokenization": "char",
    }  # fmt: skip


def test_lengths_of_a_model_with_positions(train, evaluate, script, tmp_path, capsys):
    """By default, contexts and generated texts have at most the positions of the model."""
    model, metrics = train("--model_type", "luna", "--config_overrides", TINY)
    assert AutoTokenizer.from_pretrained(model).model_max_length == 16
    capsys.readouterr()
    assert evaluate(model) == {16: pytest.approx(metrics["eval_loss"], rel=1e-6)}
    assert "--eval_context [16, 128, 512, 2048, 8192] is reduced to [16]" in capsys.readouterr().out
    options = ["--model_name_or_path", model, "--prompt", "one t", "--output_dir", tmp_path / "text"]
    script("generate_lm").main([*map(str, options), "--device", "cpu", "--temperature", "0"])
    assert "--max_new_tokens 1000 is reduced to 12" in capsys.readouterr().out
    assert len((tmp_path / "text" / "text.txt").read_text(encoding="utf-8")) <= 17


def test_generation_prints_and_reads_lines(script, tmp_path):
    """`</s>` is a newline in the text and in the prompt."""
    tokenizer = train_words(LINES, 100)
    prompt = language_modeling.encode_prompt("to be\n or", tokenizer, "eos")
    assert prompt.tolist() == [tokenizer.convert_tokens_to_ids(["to", "be", "</s>", "or"])]
    with (tmp_path / "text.txt").open("w", encoding="utf-8") as file:
        streamer = script("generate_lm").MeasuredStreamer(tokenizer, file, 1000, tokenizer.eos_token_id)
        continued = tokenizer.convert_tokens_to_ids(["not", "</s>", "to", "</s>", "</s>", "be"])
        for token in (prompt, *prompt.new_tensor(continued)):
            streamer.put(token)
        streamer.end()
    assert (tmp_path / "text.txt").read_text(encoding="utf-8") == "to be\nor not\nto\n\nbe"


@pytest.fixture
def generate(script, tmp_path):
    """Return a function that runs the script with an untrained character model and returns its reports and text."""
    tokenizer = train_characters(["abcdefgh \n"])
    tokenizer.save_pretrained(tmp_path / "model")

    def run(*options, **fields):
        MegaForCausalLM(MegaConfig(vocab_size=len(tokenizer), **FIELDS | fields)).save_pretrained(tmp_path / "model")
        paths = ["--model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "text"]
        reports = script("generate_lm").main([*map(str, [*paths, "--prompt", "ab", "--device", "cpu", *options])])
        return reports, (tmp_path / "text" / "text.txt").read_text(encoding="utf-8")

    return run


def test_constant_memory(generate, tmp_path, capsys, monkeypatch):
    """With chunks, the cache does not grow, and transformers does not note that a length is exceeded."""
    notes: list[str] = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", notes.append)
    options = ["--max_new_tokens", "120", "--report_every", "20", "--top_k", "3"]
    rows, text = generate(*options, use_chunking=True, chunk_size=8, max_positions=8)
    assert json.loads((tmp_path / "text" / "speed.json").read_text(encoding="utf-8")) == rows and not notes
    assert [row["tokens"] for row in rows] == list(range(20, 121, 20))
    assert len({row["cache_bytes"] for row in rows}) == 1 and rows[0]["cache_bytes"] > 0
    assert all(row["tokens_per_second"] > 0 for row in rows)
    output = capsys.readouterr()
    assert text in output.out and "cache_bytes" in output.err
    assert text.startswith("ab") and len(text) > 60 and set(text) <= set("abcdefgh \n")
    rows, _ = generate(*options)
    assert rows[-1]["cache_bytes"] > 2 * rows[0]["cache_bytes"]
    assert_error(generate, "has no tokens", "--prompt", "")


def test_chunks_of_megalodon(script):
    """Megalodon always has chunks, and no table of biases."""
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "value_size": 16}
    sizes |= {"shared_representation_size": 8, "intermediate_size": 16, "ema_projection_size": 2, "norm_num_groups": 4}
    model = MegalodonForCausalLM(MegalodonConfig(**sizes, chunk_size=8)).eval()
    ids, with_chunk = torch.arange(24)[None] % 9, script("eval_lm").with_chunk
    logits = [model(ids).logits, *(with_chunk(model, chunk)(ids).logits for chunk in (8, 16))]
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(logits[0][:, :8], logits[2][:, :8])
    assert not torch.allclose(logits[0], logits[2])


def test_a_table_of_biases_has_one_chunk(generate, evaluate, tmp_path):
    generate("--max_new_tokens", "1", use_chunking=True, chunk_size=8, relative_positional_bias="simple")
    write([{"text": "ab"}], tmp_path / "data-run_clm" / "validation.jsonl")
    assert_error(evaluate, "another bias than simple", tmp_path / "model", "--chunk_size", 4)
