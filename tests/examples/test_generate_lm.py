"""generate_lm.py: text of any length with constant memory."""

import json

import pytest

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.training.tokenizers import train_characters
from tests.examples.runs import assert_error

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
def test_errors(generate, options, message):
    assert_error(generate, message, *options)
