"""Runs that fail with one line: non-finite numbers, diverged models, unreadable recipes and data."""

import datasets
import pytest
from safetensors.torch import load_file

from luna_mega.errors import reason
from luna_mega.training.arguments import read_recipe
from luna_mega.training.data import SourceArguments, load_splits
from tests.examples.runs import TINY, assert_error, write
from tests.marks import diagonal, slow_but


@pytest.fixture
def sentences(tmp_path):
    rows = [{"sentence": f"{'good' if index % 2 else 'bad'} film", "label": index % 2} for index in range(16)]
    write(rows, tmp_path / "data" / "train.jsonl")
    return write(rows, tmp_path / "data" / "validation.jsonl")


def glue(data, output, *options):
    steps = ["--max_steps", 3, "--per_device_train_batch_size", 4]
    model = ["--config_overrides", TINY, "--vocab_size", 300, "--max_seq_length", 16]
    paths = ["--task_name", "sst2", "--dataset_path", data, "--output_dir", output]
    return [*paths, "--do_train", *steps, *model, *options]


@pytest.mark.parametrize(
    ("option", "value"), diagonal(["learning_rate", "max_grad_norm", "token_dropout"], ["nan", "inf"])
)
def test_numbers_are_finite(script, tmp_path, option, value):
    options = map(str, glue(tmp_path, tmp_path / "out", f"--{option}", value))
    assert_error(script("run_glue").parse, f"--{option} {value} must be a finite number", list(options))


# 3 steps: the gradients become NaN; 1 step: only the final weights diverge
@pytest.mark.parametrize("steps", slow_but([1], [1, 3]))
def test_a_model_that_diverges_is_not_saved(call, sentences, tmp_path, steps):
    options = ["--learning_rate", 1e30, "--max_grad_norm", 0, "--do_eval", "--max_steps", steps, "--weight_decay", 1e30]
    message = "the training diverged|the gradients are NaN"
    assert_error(call, f"({message}).* no model was saved", "run_glue", *glue(sentences, tmp_path / "out", *options))
    assert not {"README.md", "model.safetensors"} & {file.name for file in (tmp_path / "out").glob("*")}


def test_checkpoints_are_finite(call, sentences, tmp_path):
    """Checkpoints are finite even if no loss or gradient is logged, because Trainer pushes them to the Hub."""
    options = ["--learning_rate", 1e30, "--weight_decay", 1e30, "--max_grad_norm", 0, "--logging_steps", 100]
    options += ["--save_strategy", "steps", "--save_steps", 1]
    assert_error(call, "the training diverged.* no model was saved", "run_glue", *glue(sentences, tmp_path, *options))
    for file in tmp_path.glob("checkpoint-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_DATASETS_CACHE"])
def test_a_cache_that_cannot_be_written(sentences, tmp_path, monkeypatch, variable):
    """The message names the variable to set, and not only the data."""
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"  # not even root can create a folder in a file
    monkeypatch.setenv(variable, str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    message = f"cache of Hugging Face, {cache}, cannot be written .*; set the environment variable {variable} to"
    data = SourceArguments(dataset_path=str(sentences))
    assert_error(lambda: load_splits({"train": None}, data, ["sentence"]), message)
    for error in (FileNotFoundError(2, "No such file", str(tmp_path / "x")), OSError("no file")):
        assert "HF_" not in reason(error)


def test_a_recipe_that_is_its_own_base(call, sentences, tmp_path):
    (tmp_path / "a.yaml").write_text("recipe: b.yaml\n", encoding="utf-8")
    (tmp_path / "b.yaml").write_text("recipe: a.yaml\n", encoding="utf-8")
    (tmp_path / "c.yaml").write_text("recipe: c.yaml\n", encoding="utf-8")
    for name in ("a", "c"):
        options = ["--recipe", tmp_path / f"{name}.yaml"]
        assert_error(call, f"recipe .*{name}.yaml is its own base", "run_glue", *glue(sentences, "out", *options))


def test_a_recipe_is_read_twice_by_two_recipes(script, tmp_path):
    """A recipe that two recipes include is not a cycle."""
    (tmp_path / "base.yaml").write_text("seed: 5\n", encoding="utf-8")
    (tmp_path / "middle.yaml").write_text("recipe: base.yaml\n", encoding="utf-8")
    (tmp_path / "top.yaml").write_text("recipe: middle.yaml\nmax_steps: 3\n", encoding="utf-8")
    read = read_recipe
    assert read(str(tmp_path / "top.yaml"), {"seed", "max_steps"}) == {"seed": "5", "max_steps": "3"}


def test_control_characters_are_not_printed(call, tmp_path):
    assert_error(call, r"\\x1b\[31m", "run_glue", *glue("\x1b[31mdata", tmp_path / "out"))


def mlm(data, output):
    model = ["--config_overrides", TINY, "--vocab_size", 300, "--max_seq_length", 32]
    return ["--dataset_path", data, "--output_dir", output, "--do_train", "--max_steps", 1, *model]


@pytest.mark.parametrize(("kind", "content"), diagonal(["jsonl", "txt", "csv"], ["", "\n", " \n\n"]))
def test_files_without_text(call, tmp_path, kind, content):
    (tmp_path / "empty").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "empty" / f"{split}.{kind}").write_text(content, encoding="utf-8")
    options = mlm(tmp_path / "empty", tmp_path / "out")
    assert_error(call, "split (train|validation)|cannot load|is empty", "run_mlm", *options)


@pytest.mark.parametrize("name", ["a[b]", "[a", "a*b", "what?"])
def test_folder_names_are_not_glob_patterns(tmp_path, name):
    write([{"text": "good"}], tmp_path / name / "train.jsonl")
    source = SourceArguments(dataset_path=str(tmp_path / name))
    assert load_splits({"train": None}, source, ["text"])["train"]["text"][:] == ["good"]


def test_folders_of_splits_whose_name_is_a_pattern(tmp_path):
    """A folder whose name is a pattern raises an error, because datasets searches folders of splits by pattern."""
    (tmp_path / "a[b]" / "train").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"a\[b\]: datasets reads .* as a pattern; rename the folder"):
        load_splits({"train": None}, SourceArguments(dataset_path=str(tmp_path / "a[b]")))
