"""Details of a first hour: misspelled options, the card of a fine-tuned model, notes inside of generated text."""

import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from transformers import TrainingArguments
from transformers.generation import stopping_criteria

from luna_mega import MegaConfig, MegaForCausalLM, training as lib
from luna_mega_cli import script_options
from tests.examples.runs import TINY, write

ROBERTA = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_step", "5"], "unknown option --max_step 5; did you mean --max_steps?"),
        (["--lerning-rate=1"], "unknown option --lerning-rate=1; did you mean --learning_rate?"),
        (["--zzz", "5"], "unknown option --zzz 5"),
    ],
)
def test_misspelled_options(script, capsys, options, message):
    with pytest.raises(SystemExit):
        script("run_glue").parse(options)
    assert capsys.readouterr().err.strip().endswith(message)


@pytest.mark.parametrize("name", ["run_glue", "eval_lm", "lra/run_lra"])
def test_misspelled_options_before_the_imports(examples_dir, tmp_path, name):
    """A script reports them without importing torch and transformers."""
    command = [
        sys.executable,
        "-X",
        "importtime",
        examples_dir / f"{name}.py",
        "--output_dir",
        tmp_path,
        "--recip",
        "x",
    ]
    result = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 2 and "unknown option --recip; did you mean --recipe?" in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "ast" in imported and not {"torch", "transformers", "datasets", "numpy", "luna_mega"} & imported


def test_names_of_options(script, monkeypatch):
    """The check before the imports has the same options as the parser."""
    module = script("run_glue")
    monkeypatch.setattr(sys, "argv", [module.__file__])
    known = set().union(*map(script_options._fields, script_options._files()))
    kinds = (module.DataArguments, lib.ModelArguments, TrainingArguments)
    assert {field.name for kind in kinds for field in fields(kind) if field.init} <= known


@pytest.mark.parametrize(("kind", "overrides"), [("luna", TINY), ("roberta", ROBERTA)])
def test_card(call, tmp_path, kind, overrides):
    """The card has code that loads the model, and no empty sections."""
    write([{"sentence": "a film", "label": index % 2} for index in range(4)], tmp_path / "data" / "train.jsonl")
    options = ["--task_name", "sst2", "--dataset_path", tmp_path / "data", "--output_dir", tmp_path / "out"]
    options += ["--model_type", kind, "--config_overrides", overrides, "--vocab_size", 300, "--max_seq_length", 16]
    call("run_glue", *options, "--do_train", "--max_steps", 1)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "This model was trained from scratch on the data dataset." in card
    assert "More information needed" not in card and "## Training procedure" in card
    code = card.split("```python\n")[1].split("```")[0].replace('"out"', repr(str(tmp_path / "out")))
    names: dict = {}
    exec(code, names)  # code of the card
    assert type(names["model"]).__name__.endswith("ForSequenceClassification") and names["tokenizer"]("a")


def test_note_about_the_length(monkeypatch):
    """Texts of models without a limit do not contain the note of transformers that it is exceeded."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "shared_representation_size": 8}
    sizes |= {"nffn_hidden_size": 16, "ema_projection_size": 2, "vocab_size": 20, "max_positions": 8}
    model = MegaForCausalLM(MegaConfig(is_decoder=True, **sizes)).eval()
    notes: list[str] = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", notes.append)
    model.generate(torch.full((1, 7), 5), max_new_tokens=4, eos_token_id=None)
    assert not notes
