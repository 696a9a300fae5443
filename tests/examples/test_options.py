"""Options: each reaches what it says, has one name, and has the same values in recipes and on the command line."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedConfig, Seq2SeqTrainingArguments

from luna_mega.training import ModelArguments
from luna_mega.training.tokenizers import train_bpe, train_joint_bpe
from luna_mega_cli import script_options
from tests.examples.conftest import EXAMPLES
from tests.examples.contract import SCRIPTS, texts
from tests.examples.runs import assert_error

# Options that reach the data, the processor or the model before the training -> a value, and all that it changes.
EVERY = {"train", "validation", "test"}
ALL = EVERY | {"config", "processor"}
REACHED = {
    "max_train_samples": (4, {"train"}),
    "max_eval_samples": (4, {"validation"}),
    "max_predict_samples": (4, {"test"}),
    "max_seq_length": (9, ALL),
    "max_source_length": (4, EVERY),
    "max_target_length": (9, EVERY),
    "max_option_length": (4, EVERY),
    "token_dropout": (0.5, {"train"}),
    "short_seq_prob": (0.9, {"train"}),
    "tokenization": ("byte", ALL),
    "line_end": ("eos", EVERY),
    "sampling_rate": (500, ALL),
    "max_seconds": (0.03, EVERY | {"config"}),
    "random_shift": (0.01, {"train", "config"}),
    "random_speed": (0.2, {"train", "config"}),
    "random_gain": (6, {"train"}),
    "random_noise": (0.3, {"train"}),
    "crop_padding": (2, {"train"}),
    "horizontal_flip": ("true", {"train"}),
    "image_mean": (0.1, EVERY | {"processor"}),
    "image_std": (0.1, EVERY | {"processor"}),
    "image_size": (16, ALL),
    "center_crop": ("true", EVERY | {"processor"}),
    "channels": (3, ALL),
    "patch_size": (2, {"config"}),
    "validation_share": (0.4, {"train", "validation"}),
    "hold_out": ("take=1", {"train", "validation"}),
    "convention": ("luna", EVERY | {"config"}),
    "config_overrides": ("initializer_range=0.5", {"config"}),
}


def plain(value: Any) -> Any:
    """Return a value of a row as numbers and lists."""
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def observe(script, name: str, data: Path, *options: object) -> dict[str, Any]:
    """Return what a script has read before it trains: its splits, its processor, and the configuration."""
    module, row = script(name), SCRIPTS[name]
    options = [*row.data, *row.short, *row.model, "--dataset_path", data, "--output_dir", data, "--use_cpu", *options]
    if "--vocab_size" in row.model:  # its training would depend on the rows
        options += ["--tokenizer_name", data / "tokenizer"]
    tasks = ["--do_train", "--do_eval"] + ["--do_predict"] * (row.written is not None)
    parsed = module.parse([*map(str, [*tasks, *options])])
    splits, processor, *rest = module.load_data(*parsed[:3])
    found: dict[str, Any] = {
        split: plain(rows) if name == "run_clm" else [{key: plain(value) for key, value in row.items()} for row in rows]
        for split, rows in splits.items()
    }
    processor = processor[0] if isinstance(processor, tuple) else processor
    is_tokenizer = hasattr(processor, "get_vocab")
    found["processor"] = [processor.get_vocab(), processor.model_max_length] if is_tokenizer else processor.to_dict()
    config = [part for part in rest if isinstance(part, PreTrainedConfig)]
    return found | {"config": config[0].to_dict()} if config else found


def own_fields(module: ModuleType) -> set[str]:
    """Return the options of a script that are not those of Trainer."""
    kinds = [getattr(module, kind, None) for kind in ("DataArguments", "ModelArguments", "Arguments")]
    kinds += [] if hasattr(module, "Arguments") else [ModelArguments]
    return {field.name for kind in kinds if kind for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_reach_what_they_say(name, script, tmp_path):
    """Options that act before the training change what they name, and nothing else."""
    fields = own_fields(script(name))
    data = SCRIPTS[name].write(tmp_path, train=6, validation=6, test=6)
    train = train_joint_bpe if name == "run_translation" else train_bpe
    train(texts(9, 0), 300, 9).save_pretrained(tmp_path / "tokenizer")
    before = observe(script, name, data)
    for option in sorted(fields & REACHED.keys()):
        value, parts = REACHED[option]
        after = observe(script, name, data, f"--{option}", value)
        assert {part for part in before if after[part] != before[part]} == parts & before.keys(), option


@pytest.mark.parametrize("name", ["run_text_classification", "run_clm", "run_audio"])
def test_held_out_rows_are_never_trained_on(name, script, tmp_path):
    option = "hold_out" if name == "run_audio" else "validation_share"
    data, held = SCRIPTS[name].write(tmp_path, train=20, test=6), [f"--{option}", REACHED[option][0]]
    train_bpe(texts(9, 0), 300, 9).save_pretrained(tmp_path / "tokenizer")
    first, second = (observe(script, name, data, *held, "--do_eval", value)["train"] for value in ("true", "false"))
    assert first == second


@pytest.mark.parametrize(
    ("name", "option", "answer"),
    [
        ("run_mlm", "block_size", "max_seq_length"),
        ("run_clm", "max_seq_length", "block_size"),
        ("run_glue", "train-file", "dataset_path"),
        ("run_glue", "lerning-rate", "learning_rate"),
        ("run_translation", "val_max_target_length", "max_target_length"),
        ("eval_lm", "batch_size", "per_device_eval_batch_size"),
        ("demo", "epochs", "num_train_epochs"),
        ("run_glue", "zzz", None),
    ],
)
def test_other_names(script, capsys, name, option, answer):
    with pytest.raises(SystemExit):
        script(name).main([f"--{option}=1", *["--model_name_or_path=x", "--output_dir=x"] * (name == "eval_lm")])
    advice = f"; did you mean --{answer}?" if answer else ""
    assert capsys.readouterr().err.strip().endswith(f"unknown option --{option}=1{advice}")


@pytest.mark.parametrize("name", ["eval_lm", "lra/run_lra"])
def test_names_are_checked_before_the_imports(tmp_path, name):
    """A script reports an unknown option without importing torch and transformers."""
    command = [sys.executable, "-X", "importtime", str(EXAMPLES / f"{name}.py"), "--output_dir", str(tmp_path)]
    result = subprocess.run([*command, "--recip", "x"], capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 2 and "unknown option --recip; did you mean --recipe?" in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "ast" in imported and not {"torch", "transformers", "datasets", "numpy", "luna_mega"} & imported


def test_the_check_before_the_imports_has_all_options(script, monkeypatch):
    module = script("run_translation")
    fields = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
    options = [f"--{name.replace('_', '-')}=1" for name in {*own_fields(module), *fields}]
    monkeypatch.setattr(sys, "argv", [module.__file__, *options])
    script_options.check_names("__main__")


# An option of each type, and texts of values: numbers of YAML 1.1, its booleans, dates, times and empty values.
TYPES = ("max_steps", "learning_rate", "do_eval", "bf16", "save_strategy", "label_column", "validation_share")
TEXTS = "1 0 8.5 1e-3 1e3 010 0x10 0b1 -1 1:30 2026-01-01 .inf .nan nan half true True yes no on off auto epoch".split()
TEXTS += "never 1_000 0.5 a +1 1. inf".split()


def parsed(script, folder: Path, *options: str) -> list[Any]:
    """Return the options of a script."""
    needed = ["--do_train", "--dataset_path", str(folder), "--output_dir", str(folder / "out"), "--use_cpu"]
    return script("run_text_classification").parse([*needed, *options])[:3]


@settings(max_examples=60)
@given(option=st.sampled_from(TYPES), text=st.sampled_from(TEXTS))
def test_values_of_recipes_are_those_of_the_command_line(script, tmp_path, option, text):
    """The text of a value means the same in both; what is an error in one is an error in the other."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{option}: {text}\n", encoding="utf-8")
    found = []
    for options in ([f"--{option}={text}"], ["--recipe", str(recipe)]):
        try:
            groups = parsed(script, tmp_path, *options)
            found.append(next(getattr(group, option) for group in groups if hasattr(group, option)))
        except SystemExit as error:
            assert error.code == 2 or "\n" not in str(error) and str(error).startswith("error: ")
            found.append("error")
    assert found[0] == found[1] and type(found[0]) is type(found[1])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max_steps: '7'", "max_steps", 7),
        ("label_column: 'null'", "label_column", "null"),
        ("text_columns: [a, yes]", "text_columns", ["a", "yes"]),
        ("text_columns: a", "text_columns", ["a"]),
        ("lr_scheduler_kwargs: {min_lr: 1e-7, a: true}", "lr_scheduler_kwargs", {"min_lr": 1e-7, "a": True}),
        ("lr_scheduler_kwargs: '{\"a\": 1}'", "lr_scheduler_kwargs", {"a": 1}),
        ("recipe: base.yaml\nmax_steps: 3", "max_steps", 3),
        ("recipe: middle.yaml\nmax_steps: 3", "seed", 5),
    ],
)
def test_values_of_yaml(text, name, value, script, tmp_path):
    """Lists and dictionaries are values; a recipe overrides its base, which several recipes may have."""
    (tmp_path / "base.yaml").write_text("seed: 5\nmax_steps: 1\n", encoding="utf-8")
    (tmp_path / "middle.yaml").write_text("recipe: base.yaml\n", encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    groups = parsed(script, tmp_path, "--recipe", str(tmp_path / "recipe.yaml"))
    found = next(getattr(group, name) for group in groups if hasattr(group, name))
    assert found == value and isinstance(found, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"seed: {value}", "seed has no value") for value in ("", "~", "null")),
        *((f"bf16: {value}", "bf16 .* must be a value") for value in ("[1]", "{a: 1}")),
        *((f"text_columns: {value}", "must be values") for value in ("[]", "{a: b}", "[[a]]")),
        ("seed: 1\nseed: 2", "seed has several values"),
        ("steps: 5", "unknown option steps; did you mean --max_steps"),
        *((text, "must contain `option: value` lines") for text in ("- seed", "seed", "", "? [seed]\n: 1")),
        ("seed: &a [*a]", "recipe"),
        ("a: [", "recipe"),
        ("recipe: recipe.yaml", "recipe.yaml is its own base"),
        ("recipe: other.yaml", "recipe.yaml is its own base"),
        ("recipe: absent.yaml", "--recipe .*absent.yaml: no such file"),
    ],
)
def test_invalid_recipes(text, message, script, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "other.yaml").write_text("recipe: recipe.yaml", encoding="utf-8")
    assert_error(parsed, message, script, tmp_path, "--recipe", str(tmp_path / "recipe.yaml"))
