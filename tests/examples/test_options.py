"""One option has one name in all scripts, and other names are answered with it."""

import pytest

from luna_mega.training import arguments

SCRIPTS = [
    "bag_of_words", "demo", "eval_lm", "generate_lm", "log_mel", "lra.run_lra", "run_audio", "run_clm", "run_glue",
    "run_image_classification", "run_mlm", "run_race", "run_text_classification", "run_translation",
]  # fmt: skip
# Options with another meaning than the first name of their group: blocks of a stream of text, one column and not two.
OTHER_MEANING = {"block_size": {"run_clm"}, "text_column": {"run_clm", "run_mlm", "eval_lm"}}
REQUIRED = ["--model_name_or_path=x", "--output_dir=x"]


@pytest.fixture
def known(script, monkeypatch):
    """Return a function that returns the options of a script."""

    def read(name: str) -> set[str]:
        found: list[str] = []
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(arguments, "find_names", lambda names, options: found.extend(options) or "")
            script(name).main(["--unknown=1", "--prompt=x", *REQUIRED])
        return set(found)

    return read


def test_synonyms_are_no_options(known, examples_dir):
    parsed = {path.stem for path in examples_dir.rglob("*.py") if "parse_arguments(" in path.read_text("utf-8")}
    assert parsed == {name.rpartition(".")[2] for name in SCRIPTS}
    options = {name: known(name) for name in SCRIPTS}
    used = set().union(*options.values())
    for first, *others in arguments.SYNONYMS:
        assert first in used, first
        for other in set(others) - {"dataset_path"}:  # a folder instead of files
            scripts = {name for name in SCRIPTS if other in options[name]}
            assert not scripts or OTHER_MEANING.get(other) == scripts, (other, scripts)
    for name in SCRIPTS:  # options of Trainer have its names
        assert options[name] & {"batch_size", "steps", "lr", "epochs", "warmup"} == set(), name


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
