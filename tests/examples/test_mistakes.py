"""Mistakes: each ends with one line that names the value and what to do, before anything is written."""

from importlib.util import find_spec
from pathlib import Path

import datasets
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from transformers import ResNetConfig

from luna_mega.errors import reason
from luna_mega.training.data import SourceArguments, load_splits
from tests.examples.contract import MEGA, SCRIPTS
from tests.examples.runs import TINY, assert_error, write

WORKS = {"train": 16, "validation": 6, "test": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that returns a folder with valid data of a script, which is written once."""
    place = tmp_path_factory.mktemp("data")

    def folder(name):
        return place / name if (place / name).exists() else SCRIPTS[name].write(place / name, **WORKS)

    return folder


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Run in a folder with the empty `folder` and the empty `file`, and without `missing`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()


@pytest.fixture
def main(script):
    """Return a function that checks the error of a script, which would train if nothing were wrong."""

    def check(message, name, data, *options, output=Path("out")):
        row = SCRIPTS[name]
        paths = ["--dataset_path", data, "--output_dir", "out", "--use_cpu", "--do_train", "--max_steps", 1]
        options = [*row.data, *row.short, *row.model, *paths, *options]
        assert_error(script(name).main, message, [*map(str, options)], output=output)

    return check


EVERY = [
    (["--recipe", "missing"], "--recipe missing: no such file"),
    (["--recipe", "folder"], "--recipe folder is a folder, not a file"),
    (["--dataset_path", "missing"], "--dataset_path missing: no such folder"),
    (["--dataset_path", "file"], "--dataset_path file is a file, not a folder"),
    (["--dataset_path", "folder"], "folder has no split train; "),
    (["--output_dir", "file/out"], "--output_dir file is a file, not a folder"),
    (["--model_name_or_path", "./missing"], "--model_name_or_path ./missing: no such folder; pass a folder or"),
    (["--model_name_or_path", "file"], "file: is a file; pass a folder or a name on the Hub"),
    (["--model_name_or_path", "x/y"], "x/y: no such folder, and the Hub cannot be reached"),
    (["--learning_rate", "nan"], "--learning_rate nan must be a finite number"),
    (["--resume_from_checkpoint", "last"], "--resume_from_checkpoint last: no checkpoint there"),
    (["--do_train", "false"], "nothing to do; pass --do_train, --do_eval or --do_predict"),
    (["--do_train", "false", "--do_eval"], "need --model_name_or_path"),
    (["--load_best_model_at_end", "--save_strategy", "steps"], "save and eval strategy"),
    (["--hub_token", "x"], "--hub_token: Trainer would push it"),
    (["--license", "my\nown"], "--license"),
    (["--config_overrides", "width=3"], "has no field width"),
    (["--config_overrides", "lunar.hidden_size=1"], "there is no model type lunar; use luna.FIELD"),
    (["--model_type", "megga", "--config_overrides", ""], "megga"),
]


BEST = ["--do_eval", "--eval_strategy", "steps", "--save_strategy", "steps", "--load_best_model_at_end"]
SMALL = f"{TINY},position_embedding_type=none"
MISTAKES = {
    "run_glue": [
        (["--task_name", "squad"], "--task_name squad must be one of cola, mnli"),
        (["--config_overrides", "hidden_size=16,num_attention_heads=3"], "must be divisible"),
        (["--vocab_size", 260], r"vocab_size \(260\) must be at least 261"),
        (["--config_overrides", f"{TINY},vocab_size=200"], "the model has vocab_size=200"),
        (["--early_stopping_patience", 2], "needs --load_best_model_at_end"),
        (["--max_train_samples", 0], "split train is empty"),
        (["--token_dropout", 1], r"--token_dropout 1.0: must be in \[0, 1\)"),
        (["--do_predict", "--task_name", "mnli"], "has no split test_matched, test_mismatched"),
        (["--model_type", "luna_seq2seq", "--config_overrides", ""], "luna_seq2seq is not supported: transformers has"),
        (["--tokenizer_name", "teachr"], "--tokenizer_name teachr: no such folder, and the Hub cannot be reached"),
        (["--metric_path", "glue"], "--metric_path glue .*doesn't exist on the Hugging Face Hub"),
        (["--dataset_path", "\x1b[31mdata"], r"\\x1b\[31m"),
    ],
    "run_text_classification": [
        (["--validation_share", 1], r"--validation_share 1.0 must be in \[0, 1\)"),
        (["--text_columns", "a", "b", "c"], "--text_columns a b c must be one column, or two columns for pairs"),
        (["--dataset_name", "stanfordnlp/imdb"], "pass one of --dataset_name and --dataset_path"),
    ],
    "run_mlm": [
        (["--do_predict"], "no test predictions"),
        (["--mlm_probability", 1.5], "--mlm_probability 1.5 must be between 0 and 1"),
        (["--short_seq_prob", -0.1], "--short_seq_prob -0.1 must be between 0 and 1"),
        (["--max_seq_length", 1], "--max_seq_length 1 must be at least 2"),
        (["--max_seq_length", 4000], "split train has too little text for one block of 4000 tokens"),
        (["--dataset_name", "a/b"], "pass one of --dataset_name, --dataset_path, or --train_files and --validation_f"),
        (["--train_files", "missing"], "--train_files missing: no such file"),
        (["--streaming", "true", "--max_steps", 0], "--streaming needs --max_steps"),
        (["--streaming", "true", "--dataloader_num_workers", 2], "--streaming supports at most 1 worker"),
        (["--streaming", "true", "--shuffle_buffer", 0], "--shuffle_buffer 0 must be at least 1"),
    ],
    "run_clm": [
        (["--model_type", "t5"], "t5 has no causal language model"),
        (["--model_type", "llama", "--carry_state", "true"], "requires a recurrent state: --model_type luna or mega"),
        (["--block_size", 100000], "too few for blocks of 100000"),
        (["--carry_state", "true", "--block_size", 5000], "too few for 8 blocks"),
        (["--min_block_size", 12], "must be multiples of the chunk size 8"),
        (["--min_block_size", 24], "--min_block_size 24 and --block_size 16"),
        (["--max_tokens", 15], "--max_tokens 15 is below --block_size 16"),
        (
            ["--max_tokens", 64, "--auto_find_batch_size", "true"],
            "--auto_find_batch_size True is not supported with",
        ),
        (["--carry_state", "true", "--min_block_size", 8], "--min_block_size is not supported with --carry_state"),
        (["--carry_state", "true", "--gradient_checkpointing", "true"], "--carry_state requires a single process"),
        (["--carry_state", "true", "--auto_find_batch_size", "true"], "--auto_find_batch_size is not supported with"),
        (["--streaming", "true", "--validation_share", 0.1], "--streaming is not supported with --carry_state"),
        (["--do_predict"], "no test predictions"),
        *(
            (["--carry_state", "true", "--model_type", model, "--config_overrides", overrides], message)
            for model, overrides, message in (
                ("luna", TINY, "tokens, but the model has 16 positions; pass --config_overrides position_embedding_ty"),
                ("mega", f"{MEGA},relative_positional_bias=simple", "relative_positional_bias=rotary"),
                ("luna", f"{SMALL},layerdrop=0.1", "but layerdrop=0.1 skips some"),
            )
        ),
    ],
    "run_audio": [
        (["--do_eval", "--hold_out", "speaker=3"], "split train has no column speaker, only clip"),
        (["--do_eval", "--hold_out", "take=0,1,2,3"], "must select some of the 16 training rows, got 16"),
        (["--audio_column", "take"], "column take contains '0' instead of a clip"),
        (["--rate_column", "rate"], "split train has no column rate"),
        (["--random_noise", -1], "--random_noise -1.0 must be at least 0"),
        (["--sampling_rate", 0], "--sampling_rate 0 must be above 0"),
        (["--random_speed", 1], "--random_speed 1.0 must be below 1"),
        (["--max_seconds", 0.0001], "split train, row 0: clip is empty, not finite or"),
        (["--config_overrides", f"{MEGA},relative_positional_bias=simple,max_positions=8"], "do not fit in the 8"),
        (["--config_overrides", f"{MEGA},input_type=tokens"], "the model reads tokens .input_type., not values"),
    ],
    "run_image_classification": [
        (["--patch_size", 3], "--patch_size 3 does not divide the size of the images, 8"),
        (["--mixup", -1], "--mixup -1.0 must be at least 0"),
        (["--random_erasing", 0.2], "--random_erasing 0.2 is a part of timm's transform"),
        (["--image_mean", 0.5, 0.5], "must have 1 numbers, got 2 and 1"),
        (["--auto_augment", "none", "--horizontal_flip"], "--auto_augment crops and flips"),
        (["--mixup", 0.8], r"this augmentation requires timm, run `pip install '\.\[vision\]'`"),
    ],
    "lra.run_lra": [
        (["--mlm_probability", 1], "--mlm_probability 1.0 must be between 0 and 1"),
        (["--self_pretraining_steps", -1], "--self_pretraining_steps -1 must be at least 0"),
        (["--max_seq_length", 3], "--max_seq_length 3 must be at least 4"),
        (["--warmup_power", 2, "--lr_scheduler_type", "cosine"], "requires --lr_scheduler_type linear"),
        (["--paper_model", "true", "--model_type", "transformer", "--config_overrides", ""], "--paper_model is not av"),
    ],
    "run_translation": [
        (["--vocab_size", 259], r"vocab_size \(259\) must be at least 260"),
        (["--clip_each", 0.1], "--clip_each 0.1 must be above 0, with --max_grad_norm 0"),
        (["--max_tokens", 5], "--max_tokens 5 is below the"),
        (
            ["--max_tokens", 999, "--per_device_train_batch_size", 4],
            "_train_batch_size 4 is not supported with --max_t",
        ),
        (
            ["--max_tokens", 999, "--train_sampling_strategy", "group_by_length"],
            "group_by_length is not supported with",
        ),
        (
            ["--max_tokens", 999, "--accelerator_config", '{"split_batches": true}'],
            "split_batches requires batches of one",
        ),
        (["--warmup_init_lr", 1e-5], "--warmup_init_lr 1e-05 requires --milestones"),
        (["--source_lang", "fr"], "split train has no column translation.fr, only translation"),
        (["--source_lang", "de"], "--source_lang and --target_lang are both de; pass two languages"),
        (["--max_target_length", 1], "--max_target_length 1 must be at least 2"),
        (["--max_source_length", 2], "all training pairs are too long"),
        (["--milestones", 5], "--milestones requires --lr_scheduler_type constant_with_warmup, got linear"),
        (["--lr_scheduler_type", "constant_with_warmup", "--milestones", 5, 2], "must be sorted"),
        (["--average_checkpoints", 3, "--save_total_limit", 2], "3 needs --save_total_limit 3, or none; it is 2"),
        (["--average_checkpoints", -1], "--average_checkpoints -1 must be at least 0"),
        (["--average_checkpoints", 2, "--save_strategy", "no"], "--average_checkpoints 2 needs checkpoints"),
        (
            ["--average_checkpoints", 2, "--save_total_limit", 2, *BEST],
            "--average_checkpoints 2 needs --save_total_limit 3 with --load_best_model_at_end, or none; it is 2",
        ),
        (["--do_predict", "--test_paths", "folder", "folder"], "the folders must have different names"),
        (["--test_paths", "missing"], "--test_paths missing: no such folder"),
    ],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_mistakes_of_a_script(name, main, folders, tmp_path):
    for options, message in [*EVERY, *MISTAKES.get(name, [])]:
        if "requires timm" not in message or not find_spec("timm"):
            main(message, name, folders(name), *options)
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    main("checkpoint-5 already exists; pass --resume_from_checkpoint last", name, folders(name), output=None)


LM = ["--prompt", "a", "--model_name_or_path"]
NO_HUB = "a/b: no such folder, and the Hub cannot be reached (.*), or pass a local folder with --"
PROGRAMS = {  # `data` has the splits train and test with two rows: a text, a number and a label
    "run_mlm": [
        (["--do_train"], "pass one of --dataset_name"),
        (["--do_train", "--do_eval", "--validation_files", "file"], "pass --train_files as well"),
        (["--do_train", "--train_files", "file"], "file cannot be read; use .parquet"),
        (["--do_train", "--dataset_name", "a/b"], f"{NO_HUB}dataset_path"),
    ],
    "run_text_classification": [(["--do_train", "--dataset_name", "a/b"], f"{NO_HUB}dataset_path")],
    "generate_lm": [
        ([*LM, "folder", "--max_new_tokens", "0"], "--max_new_tokens 0 must be at least 1"),
        ([*LM, "folder", "--temperature", "-1"], "--temperature -1.0 must be at least 0"),
        ([*LM, "./missing"], "--model_name_or_path ./missing: no such folder"),
    ],
    "bag_of_words": [(["--dataset_path", "data", "--split", "test"], "empty vocabulary")],
    "eval_lm": [(["--model_name_or_path", "folder", "--last_share", "2"], r"--last_share 2.0 must be in \(0, 1\]")],
    "prepare_text": [
        (["--source", "a/b", "text"], f"{NO_HUB}source"),
        (["--source", "file", "text"], "--source file is a file, not a folder"),
        (["--source", "data", "text", "--output_dir", "file"], "--output_dir file is a file, not a folder"),
        (["--source", "data", "txt"], "has no column txt, only text"),
        (["--source", "data", "number"], "row 0: number is 7 instead of text"),
        (["--source", "folder", "text"], "has no split train or unsupervised"),
        (["--source", "data", "text", "--validation", "2"], "--validation 2 must be between 0 and the 2 texts"),
    ],
    "lra.prepare": [
        (["text", "--source", "a/b"], f"{NO_HUB}source"),
        (["text", "--source", "data", "--validation", "2"], "--validation 2 must be below the 2 training rows"),
        (["image", "--source", "data"], "no split train with the columns img, label"),
        (["pathfinder", "--size", "48"], "no Pathfinder of 48 x 48 pixels .*: sizes are 32, 64, 128, 256"),
        (["pathfinder", "--contour_length", "5"], "contours 6, 9, 14"),
        (["listops", "--max_length", "400"], "more than 500 and less than 400 tokens"),
        (["listops", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["listops", "--output_dir", "data"], "contains other files; choose another --output_dir"),
    ],
    "reproduce": [
        ([], "no name: pass one of enwik8, wikitext103, speech, lra, imagenet, luna-base"),
        (["imagenet", "--checkpoint", "x.pt"], "imagenet requires --checkpoint and --data, because their addresses"),
        (["lra"], "--task_name None: lra has listops, text, retrieval"),
        (["enwik8", "--task_name", "text"], "--task_name text: enwik8 has no tasks; omit it"),
        (["lra", "--task_name", "listops"], "--task_name listops requires --data"),
        (["wikitext103", "--prepare"], "--prepare: the data of wikitext103 need no preparation"),
    ],
    "demo": [(["--num_train_epochs", "-1"], "--num_train_epochs -1.0 must be at least 0")],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_mistakes_of_a_program(name, script, tmp_path):
    """Programs without a training, and scripts without data; names on the Hub are checked with one request."""
    for split in ("train", "test"):
        write([{"text": text, "number": 7, "label": 0} for text in "ab"], tmp_path / "data" / f"{split}.jsonl")
    for options, message in PROGRAMS[name]:
        output = [] if "--output_dir" in options or name == "bag_of_words" else ["--output_dir", "out"]
        assert_error(script(name).main, message, [*options, *output], output=tmp_path / "out")


CSQA = {"id": "1", "question": "a", "choices": {"label": list("abcde"), "text": list("vwxyz")}, "answerKey": "A"}
PAIRS = ["--model_type", "roberta", "--config_overrides", ""]
IMAGES = {"image": bytes(64), "label": 0}
ROWS = {  # options, the columns that differ from valid rows, and the sentence
    "run_race": [
        ([], {"options": list("abc")}, "row .: 3 options instead of 4"),
        ([], {"options": "abcd"}, "instead of a list of texts"),
        ([], {"answer": "E"}, "row .: label 'E' is not one of A, B, C, D"),
        (["--task_name", "csqa"], CSQA, "the options are called"),
        (["--dataset_path", "data", "folder"], {}, "folder has no split train"),
    ],
    "run_audio": [
        ([], {"clip": [[0.1, 0.2]]}, "row .: clip is empty, not finite or has several channels"),
        *(([], {"sampling_rate": rate}, f"must be a positive integer, got {rate}") for rate in (0, -8000, None, 0.5)),
    ],
    "lra.run_lra": [
        ([], {"label": 2}, "row .: label 2 is not one of 0, 1"),
        (["--task_name", "retrieval", *PAIRS], {"text1": "a", "text2": "b"}, "PairClassification; use luna, mega"),
        (["--task_name", "pathx"], IMAGES | {"image": b"\x89PNG\r"}, "an image cannot be read"),
        (["--task_name", "image", "--max_seq_length", 256], IMAGES, "has 8 x 8 pixels, but 256 positions require 16"),
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_fit(name, main, tmp_path):
    for options, change, message in ROWS[name]:
        rows = [row | change for row in SCRIPTS[name].rows(4, 0)]
        main(message, name, write(rows, tmp_path / "data" / "train.parquet"), *options)


@pytest.mark.parametrize("name", ["run_text_classification", "run_audio", "run_image_classification"])
def test_rows_of_one_class(name, main, tmp_path):
    """As the first rows of data that are sorted by label."""
    rows = [row for row in SCRIPTS[name].rows(8, 0) if row["label"] in (0, "bad", "left")]
    message = "the split train has a single label, .*; shuffle the rows"
    main(message, name, write(rows, tmp_path / "data" / f"train.{SCRIPTS[name].suffix}"))


WITHOUT_A_SPLIT = {"run_text_classification": "pass --validation_share", "run_audio": "pass --hold_out"}
WITHOUT_A_SPLIT["run_clm"] = WITHOUT_A_SPLIT["run_text_classification"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_missing_splits_and_files(name, main, tmp_path):
    """A missing split, two formats, an empty file, and files without any row."""
    row, data = SCRIPTS[name], tmp_path / "data"
    train = row.write(data, train=16) / f"train.{row.suffix}"
    advice = WITHOUT_A_SPLIT.get(name, "files are called validation.parquet")
    main(f"has no split validation, only train; {advice}", name, data, "--do_eval")
    (data / "validation.txt").write_text("a\n", encoding="utf-8")
    main("cannot load|has no column|CSV|same data file format", name, data, "--do_eval")
    train.write_bytes(b"")
    main(f"train.{row.suffix} is empty", name, data)
    train.unlink()
    for suffix, content in (("csv", ",".join(row.rows(1, 0)[0])), ("jsonl", ""), ("txt", "\n ")):
        (data / f"train.{suffix}").write_text(f"{content}\n", encoding="utf-8")
        main("cannot load|has no column|too little text|too few|a split has no rows|too short", name, data)
        (data / f"train.{suffix}").unlink()


@pytest.mark.parametrize("name", SCRIPTS)
def test_incomplete_rows(name, main, tmp_path):
    """A missing column, a row without a text, and a row without a label."""
    row = SCRIPTS[name]
    messages = {column: f"split train, row 1: {column} is None instead of text" for column in row.texts}
    if row.label:
        messages[row.label] = "split train, row 1: label .* is not one of .*; 1 of 6 rows have no label, remove them"
    for column, message in messages.items():
        rows = pd.DataFrame(row.rows(6, 0))
        if len(rows.columns) > 1:
            data = write(rows.drop(columns=column), tmp_path / f"no-{column}" / "train.parquet")
            main(f"split train has no column {column}, only ", name, data)
        rows[column] = rows[column].where(rows.index != 1, None)
        main(message, name, write(rows, tmp_path / f"empty-{column}" / f"train.{row.suffix}"))


SAVED = {  # options that do not fit a saved model
    "run_audio": [(["--sampling_rate", 500], "--sampling_rate 500: .* has 1000")],
    "run_image_classification": [
        (["--image_size", 12], "reads images of 8 x 8 in 1 channels, not of 12 in 1"),
        (["--channels", 3], "reads images of 8 x 8 in 1 channels, not of 8 in 3"),
        (["--image_mean", 0.3], "--image_mean .0.3.: .* has its own, .*; remove the option"),
        (["--image_std", 0.3], "--image_std .0.3.: .* has its own, .*; remove the option"),
    ],
}


@pytest.mark.parametrize("name", SAVED)
def test_models_of_other_inputs(name, main, train, tmp_path):
    """The processor of a saved model determines its inputs; it is an error if the folder has none."""
    source = [name, tmp_path / f"data-{name}", "--model_name_or_path", train("saved", name, "--max_steps", 1)]
    for options, message in SAVED[name]:
        main(message, *source, *options)
    if name == "run_image_classification":
        ResNetConfig().save_pretrained(tmp_path / "resnet")
        main("resnet has no image_size and patch_size", *source[:2], "--model_name_or_path", tmp_path / "resnet")
    (tmp_path / "saved" / "preprocessor_config.json").unlink()
    main("saved.*preprocessor_config.json", *source)


DAMAGED = ["run_glue", "run_mlm", "run_race", "run_image_classification"]


@settings(max_examples=12)
@given(name=st.sampled_from(DAMAGED), cut=st.floats(0, 0.999), flipped=st.floats(0, 0.999), byte=st.integers(0, 255))
def test_damaged_files(script, folders, tmp_path_factory, name, cut, flipped, byte):
    """A file that was cut, and of which one byte was changed, is read, or is an error of one line."""
    row, place = SCRIPTS[name], tmp_path_factory.mktemp("damaged")
    content = bytearray((folders(name) / f"train.{row.suffix}").read_bytes())
    content[int(flipped * len(content))] = byte
    (place / f"train.{row.suffix}").write_bytes(content[: len(content) - int(cut * len(content))])
    options = [*row.data, *row.short, *row.model, "--dataset_path", place, "--output_dir", place / "out", "--use_cpu"]
    module = script(name)
    parsed = module.parse([*map(str, [*options, "--do_train"])])
    try:
        with parsed[3].reading():
            module.load_data(*parsed[:3])
    except SystemExit as error:
        assert str(error).startswith("error: ") and "\n" not in str(error)
    assert not (place / "out").exists()


# 3 steps: the gradients become NaN; 1 step: only the final weights diverge
@pytest.mark.parametrize("steps", [1, 3])
def test_a_model_that_diverges_is_not_saved(main, folders, tmp_path, steps):
    """Checkpoints are finite even if no loss or gradient is logged, because Trainer pushes them to the Hub."""
    options = ["--learning_rate", 1e30, "--weight_decay", 1e30, "--max_grad_norm", 0, "--save_steps", 1]
    options += ["--max_steps", steps, "--logging_steps", 1 if steps == 1 else 100]
    message = "(the training diverged|the gradients are NaN).* no model was saved"
    main(message, "run_glue", folders("run_glue"), *options, output=None)
    assert not {"README.md", "model.safetensors"} & {file.name for file in (tmp_path / "out").glob("*")}
    for file in tmp_path.glob("out/checkpoint-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_DATASETS_CACHE"])
def test_a_cache_that_cannot_be_written(folders, tmp_path, monkeypatch, variable):
    """The message names the variable to set, and not only the data."""
    cache = tmp_path / "file" / "cache"  # not even root can create a folder in a file
    monkeypatch.setenv(variable, str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    message = f"cache of Hugging Face, {cache}, cannot be written .*; set the environment variable {variable} to"
    data = SourceArguments(dataset_path=str(folders("run_glue")))
    assert_error(lambda: load_splits({"train": None}, data, ["sentence"]), message)
    for error in (FileNotFoundError(2, "No such file", str(tmp_path / "x")), OSError("no file")):
        assert "HF_" not in reason(error)
