"""One option has one name in all scripts, and other names are answered with it."""

from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from luna_mega.training import arguments
from luna_mega_cli import script_options

# Options with another meaning than the first name of their group: blocks of a stream of text, one column and not two.
OTHER_MEANING = {"block_size": {"run_clm"}, "text_column": {"run_clm", "run_mlm", "eval_lm"}}
REQUIRED = ["--model_name_or_path=x", "--output_dir=x"]


def test_synonyms_are_no_options(examples_dir):
    """Fields of dataclasses, read from the source: in scripts, and in modules that scripts share."""
    files = [path for path in examples_dir.rglob("*.py") if "parse_arguments(" in path.read_text("utf-8")]
    files += [path for path in Path(arguments.__file__).parent.glob("*.py") if path.stem != "arguments"]
    options = {path.stem: script_options._fields(path) for path in files}
    used = set().union(*options.values(), (item.name for item in fields(TrainingArguments)))
    for first, *others in arguments.SYNONYMS:
        assert first in used, first
        for other in set(others) - {"dataset_path"}:  # a folder instead of files
            assert {name for name in options if other in options[name]} == OTHER_MEANING.get(other, set()), other


@pytest.mark.parametrize(
    ("name", "option", "answer"),
    [
        ("run_mlm", "block_size", "max_seq_length"),
        ("run_mlm", "max_length", "max_seq_length"),
        ("run_mlm", "train_file", "train_files"),
        ("run_mlm", "dataset_config_name", "dataset_config"),
        ("run_clm", "max_seq_length", "block_size"),
        ("run_clm", "validation_split_percentage", "validation_share"),
        ("run_glue", "task", "task_name"),
        ("run_glue", "train-file", "dataset_path"),
        ("run_race", "task", "task_name"),
        ("run_translation", "val_max_target_length", "max_target_length"),
        ("lra.run_lra", "max_length", "max_seq_length"),
        ("lra.run_lra", "masked_share", "mlm_probability"),
        ("eval_lm", "context", "eval_context"),
        ("eval_lm", "batch_size", "per_device_eval_batch_size"),
        ("demo", "epochs", "num_train_epochs"),
    ],
)
def test_other_names(script, capsys, name, option, answer):
    with pytest.raises(SystemExit):
        script(name).main([f"--{option}=1", *(REQUIRED if name == "eval_lm" else [])])
    assert capsys.readouterr().err.strip().endswith(f"unknown option --{option}=1; did you mean --{answer}?")


def test_other_names_in_a_recipe(script, tmp_path):
    (tmp_path / "recipe.yaml").write_text("block_size: 8\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"unknown option block_size; did you mean --max_seq_length\?"):
        script("run_mlm").parse(["--recipe", str(tmp_path / "recipe.yaml"), "--output_dir", "x"])
