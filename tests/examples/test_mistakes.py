"""Mistakes of a first hour with the scripts: each ends with one line that names the option and what to do."""

import pytest
from datasets import Dataset

from tests.examples.runs import TINY, assert_error, write

# Options of each script; {data} is a folder with the splits of `ROWS`.
SCRIPTS = {
    "run_glue": ["--task_name", "sst2"],
    "run_text_classification": ["--text_columns", "sentence"],
    "run_race": [],
    "run_mlm": ["--text_column", "sentence"],
    "run_clm": ["--text_column", "sentence"],
    "run_translation": [],
    "run_audio": ["--audio_column", "sentence"],
    "run_image_classification": ["--image_column", "sentence"],
    "lra.run_lra": [],
}
PATHS = {
    "recipe": ("--recipe", "--recipe {missing}: no such file", "--recipe {folder} is a folder, not a file"),
    "data": ("--dataset_path", "--dataset_path {missing}: no such folder", "--dataset_path {file} is a file, not a f"),
    "output": ("--output_dir", None, "--output_dir {file} is a file, not a folder"),
    "model": (
        "--model_name_or_path",
        "--model_name_or_path {missing}: no such folder; pass a folder or a",
        "--model_name_or_path {file}: is a file; pass a folder or a name on the Hub",
    ),
    "files": ("--train_files", "--train_files {missing}: no such file", "--train_files {folder} is a folder, not a"),
    "tests": ("--test_paths", "--test_paths {missing}: no such folder", "--test_paths {file} is a file, not a folder"),
}


@pytest.fixture
def options(tmp_path):
    write([{"sentence": "a film", "label": index % 2} for index in range(8)], tmp_path / "data" / "train.csv")
    return ["--do_train", "--dataset_path", tmp_path / "data", "--output_dir", tmp_path / "out"]


def parse(script, name, *arguments):
    return script(name).parse([*SCRIPTS[name], *map(str, arguments)])


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_paths(script, options, tmp_path, name, case):
    option, missing, other = PATHS[case]
    if {"files": "run_mlm", "tests": "run_translation"}.get(case, name) != name:
        pytest.skip("not an option of this script")
    (tmp_path / "file").touch()
    places = {"missing": tmp_path / "nowhere", "file": tmp_path / "file", "folder": tmp_path}
    if missing is not None:
        assert_error(parse, missing.format(**places), script, name, *options, option, places["missing"])
    kind = "file" if "{file}" in other else "folder"
    assert_error(parse, other.format(**places), script, name, *options, option, places[kind], output=tmp_path / "out")
    if case == "output":
        assert_error(parse, other.format(**places), script, name, *options, option, tmp_path / "file" / "out")


@pytest.mark.parametrize("name", ["prepare_text", "lra.prepare"])
@pytest.mark.parametrize("option", ["source", "output_dir"])
def test_files_instead_of_folders_of_data(script, tmp_path, name, option):
    (tmp_path / "file").touch()
    source, output = (tmp_path / "file" if option == kind else tmp_path for kind in ("source", "output_dir"))
    options = ["text", "--source", source, "--output_dir", output]
    if name == "prepare_text":
        options = ["--source", source, "text", "--output_dir", output]
    message = f"--{option} {tmp_path}/file is a file, not a folder"
    assert_error(script(name).main, message, [str(part) for part in options])


def test_base_of_a_recipe(script, options, tmp_path):
    (tmp_path / "a.yaml").write_text("recipe: b.yaml\n", encoding="utf-8")
    message = f"--recipe {tmp_path}/b.yaml: no such file"
    assert_error(parse, message, script, "run_glue", *options, "--recipe", tmp_path / "a.yaml")


@pytest.mark.parametrize("option", ["model_name_or_path", "tokenizer_name"])
def test_names_of_models(script, options, option):
    """They are checked before the data is read, with one request."""
    message = f"--{option} teachr: no such folder, and the Hub cannot be reached"
    assert_error(parse, message, script, "run_glue", *options, f"--{option}", "teachr")


DATASETS = {
    "run_glue": ["--do_train", "--output_dir", "OUT", "--dataset_name", "a/b"],
    "run_text_classification": ["--do_train", "--output_dir", "OUT", "--dataset_name", "a/b"],
    "run_mlm": ["--do_train", "--output_dir", "OUT", "--dataset_name", "a/b"],
    "prepare_text": ["--output_dir", "OUT", "--source", "a/b", "text"],
    "lra.prepare": ["text", "--output_dir", "OUT", "--source", "a/b"],
}


@pytest.mark.parametrize("name", DATASETS)
def test_names_of_datasets(script, tmp_path, name):
    """They are checked with one request, before datasets connects again and again."""
    options = [str(tmp_path / "out") if part == "OUT" else part for part in [*SCRIPTS.get(name, []), *DATASETS[name]]]
    folder = "source" if "--source" in options else "dataset_path"
    message = rf"a/b: no such folder, and the Hub cannot be reached (.*), or pass a local folder with --{folder}"
    assert_error(script(name).main, message, options)


ADVICE = {
    "run_glue": "has no split validation, only train; files are called validation.parquet",
    "run_text_classification": "has no split validation, only train; pass --validation_share",
    "run_clm": "has no split validation, only train; pass --validation_share",
    "run_mlm": "has no split validation, only train; files are called validation.parquet",
    "run_audio": "has no split validation, only train; pass --hold_out",
    "run_image_classification": "has no split validation, only train; files are called validation.parquet",
}


def load(script, name, options):
    """Read the data of a script."""
    data, model, training, run = parse(script, name, *options)
    with run.reading():
        script(name).load_data(data, model, training)


@pytest.mark.parametrize("name", ADVICE)
def test_no_validation_split(script, options, name):
    assert_error(load, ADVICE[name], script, name, [*options, "--do_eval"])


def test_no_validation_split_on_the_hub(script, monkeypatch, tmp_path):
    split = Dataset.from_dict({"text": ["a film"], "label": [0]})
    monkeypatch.setattr(
        "luna_mega.training.data.load_from_hub", lambda *args, **options: {"train": split, "test": split}
    )
    options = ["--do_eval", "--do_train", "--output_dir", tmp_path, "--dataset_name", "a/b"]
    message = "a/b has no split validation, only train, test; pass --validation_share to use a part of the split train"
    assert_error(load, message, script, "run_text_classification", options)
    message = (
        "a/b has no split validation, only train, test; pass a dataset or, with --dataset_path, a folder that has it"
    )
    assert_error(load, message, script, "run_mlm", options)


TABLES = {
    "empty": ("", "train.csv is empty"),
    "only a header": ("sentence,label\n", "cannot load .*: a split has no rows"),
    "no labels": (
        "sentence,label\na film,\na book,\n",
        "the column label has no labels|row 0: label None is not one|has no column sampling_rate",
    ),
    "no texts": (
        "sentence,label\n,0\n,1\n",
        "sentence is None instead of text|has no column sampling_rate|an image cannot be read",
    ),
}


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("name", ["run_glue", "run_text_classification", "run_audio", "run_image_classification"])
def test_incomplete_tables(script, options, tmp_path, name, case):
    content, message = TABLES[case]
    (tmp_path / "data" / "train.csv").write_text(content, encoding="utf-8")
    assert_error(load, message, script, name, options)


@pytest.mark.parametrize("name", ["run_mlm", "run_clm"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_streams_without_text(script, tmp_path, name, kind):
    (tmp_path / "data").mkdir()
    content = "\n \n\n" * 20 if kind == "txt" else '{"text": " "}\n' * 20
    (tmp_path / "data" / f"train.{kind}").write_text(content, encoding="utf-8")
    options = ["--do_train", "--streaming", "true", "--max_steps", 2, "--dataset_path", tmp_path / "data"]
    options += ["--output_dir", tmp_path / "out", "--model_type", "luna", "--config_overrides", TINY]
    length = "--max_seq_length" if name == "run_mlm" else "--block_size"
    options += ["--vocab_size", 300, length, 32]
    main = script(name).main
    assert_error(main, f"too little text for one example; reduce {length}", [str(part) for part in options])
