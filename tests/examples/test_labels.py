"""All scripts match labels by name, since a saved head and the data may order them differently."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    EvalPrediction,
    ViTConfig,
    Wav2Vec2FeatureExtractor,
)

import luna_mega
from luna_mega import LunaConfig
from luna_mega.training import images
from luna_mega.training.classification import match_labels
from luna_mega.training.models import CheckpointArguments, label_fields, make_model
from luna_mega.training.tokenizers import train_bpe
from tests.examples.rows import COLUMNS
from tests.examples.runs import QUIET, assert_error

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
# Options, name of the label column, and the label names of the data in the order of their ids.
SCRIPTS = {
    "run_glue": (["--task_name", "rte", "--max_seq_length", 16], ["entailment", "not_entailment"]),
    "run_text_classification": (["--max_seq_length", 16], ["bad", "good"]),
    "run_audio": ([], ["high", "low"]),
    "run_image_classification": ([], ["left", "right"]),
    "lra.run_lra": (["--task_name", "text", "--max_seq_length", 16], ["neg", "pos"]),
}


def save_head(script, name: str, labels: list[str], folder: Path) -> Path:
    """Save the configuration and the tokenizer or processor of a classifier with these labels."""
    fields = {**SIZES, **label_fields(labels)}
    if name == "run_audio":
        fields |= {"input_type": "values", "max_position_embeddings": 50}
        Wav2Vec2FeatureExtractor(sampling_rate=1000, return_attention_mask=True).save_pretrained(folder)
    elif name == "run_image_classification":
        fields |= {"image_size": 8, "patch_size": 4, "num_channels": 1}
        images.make_processor(8, 1, [0.5], [0.5], False).save_pretrained(folder)
    else:
        tasks = script("lra.tasks")
        lra = name == "lra.run_lra"
        made = tasks.make_tokenizer("bytes", tasks.CONVENTIONS["ours"], 16) if lra else train_bpe(["a b"], 300, 16)
        made.save_pretrained(folder)
        fields |= {"vocab_size": len(made), "pad_token_id": 1, "max_position_embeddings": 16}
    (ViTConfig if name == "run_image_classification" else LunaConfig)(**fields).save_pretrained(folder)
    return folder


def save_data(name: str, labels: list[str], folder: Path) -> Path:
    """Save splits whose four rows have the labels 0, 1, 1 and 0, with these names."""
    table = Dataset.from_list([COLUMNS[name] | {"label": label} for label in (0, 1, 1, 0)])
    folder.mkdir()
    for split in ("train", "validation"):
        table.cast_column("label", ClassLabel(names=labels)).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture
def load(script, tmp_path):
    """Return a function that loads the data of a script for a model with these labels.

    It returns the label ids of the rows, and the label names of the model.
    """

    def call(name: str, head: list[str], *more: str) -> tuple[list[int], list[str]]:
        options, labels = SCRIPTS[name]
        model, data = save_head(script, name, head, tmp_path / "model"), tmp_path / "data"
        if not data.exists():
            save_data(name, labels, data)
        paths = ["--model_name_or_path", model, "--dataset_path", data, "--output_dir", tmp_path / "out"]
        module = script(name)
        parsed = module.parse([*map(str, [*paths, *options, *more, *QUIET])])
        splits, config = {}, None
        for part in module.load_data(*parsed[:3]):
            splits, config = (part, config) if isinstance(part, dict) else (splits, part)
            if hasattr(part, "id2label"):
                break
        (split,) = splits.values()
        row = split[0]
        column = split["label" if "label" in row else "labels"]
        return [int(label) for label in column], [config.id2label[index] for index in range(config.num_labels)]

    return call


@pytest.mark.parametrize("name", SCRIPTS)
def test_labels_are_matched_by_name(name, load, capsys):
    """The head keeps its label order. Training with other names requires the option for a new head."""
    labels = SCRIPTS[name][1]
    head = [label.upper() for label in reversed(labels)]
    assert load(name, head, "--do_eval") == ([1, 0, 0, 1], head)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("labels are matched by name") and line.endswith(f"the data has {', '.join(labels)}")
    assert load(name, labels, "--do_train") == ([0, 1, 1, 0], labels)
    assert capsys.readouterr().out == ""
    first, second = labels
    message = f"has the labels {first}, other, but not {second} of the data; pass --ignore_mismatched_sizes to train"
    assert_error(load, message, name, [first, "other"], "--do_train")
    assert load(name, [first, "other"], "--do_train", "--ignore_mismatched_sizes") == ([0, 1, 1, 0], labels)
    assert "are replaced by a new head" in capsys.readouterr().out


@pytest.mark.parametrize("side", ["--do_train", "--do_eval"])
def test_default_names(side, load, capsys):
    assert load("run_text_classification", ["LABEL_0", "LABEL_1"], side) == ([0, 1, 1, 0], ["bad", "good"])
    assert capsys.readouterr().out.count("has no label names") == (side == "--do_eval")


def test_metrics_of_a_head_in_another_order(script, examples_dir):
    """F1 counts predictions of the task's label 1 for any order of the head's labels."""
    module, draw = script("run_glue"), np.random.default_rng(0)
    data = module.DataArguments(task_name="mrpc", metric_path=str(examples_dir / "metrics" / "glue_metrics"))
    logits, labels = draw.normal(size=(30, 2)), draw.integers(0, 2, 30)
    expected = module.make_metrics(data, [0, 1])(EvalPrediction(logits, labels))
    assert module.make_metrics(data, [1, 0])(EvalPrediction(logits[:, ::-1], 1 - labels)) == expected
    assert expected["f1"] != pytest.approx(expected["accuracy"])


@pytest.mark.parametrize("kind", ["luna", "pair", "bert"])
def test_new_head_of_the_same_size(kind, tmp_path):
    """A new head replaces only the output layer, whether or not its size changes."""
    config = (BertConfig if kind == "bert" else LunaConfig)(vocab_size=20, **SIZES, **label_fields(["a", "b", "c"]))
    auto = luna_mega.LunaForSequencePairClassification if kind == "pair" else AutoModelForSequenceClassification
    saved = make_model(auto, CheckpointArguments(), config)
    saved.save_pretrained(tmp_path)
    for names, labels in ((["a", "b", "d"], "new"), (["c", "b", "a"], "same"), (["x", "y"], "fewer")):
        arguments = CheckpointArguments(str(tmp_path), ignore_mismatched_sizes=True)
        config = AutoConfig.from_pretrained(tmp_path)
        config.update(label_fields(names))
        made = make_model(auto, arguments, config).state_dict()
        changed = {name for name, value in saved.state_dict().items() if not torch.equal(made[name], value)}
        assert len(changed) == {"same": 0, "new": 1, "fewer": 2}[labels]  # the bias is initialized to 0
        assert all(name.startswith("classifier") and len(made[name]) == len(names) for name in changed)


CASES = {
    "a subset": (["a", "b", "c"], ["c", "a"], {"c": 2, "a": 0}),
    "no labels": (["a", "b"], [], {}),
    "names that differ in case": (["A", "a"], ["a"], {"a": 1}),
    "ids": (["LABEL_0", "LABEL_1", "LABEL_2"], ["0", "2"], {"0": 0, "2": 2}),
    "default names": (["LABEL_0", "LABEL_1"], ["LABEL_1", "LABEL_0"], {"LABEL_1": 1, "LABEL_0": 0}),
    "ids of names": (["a", "b"], ["0", "1"], "has the labels a, b, but not 0, 1 of the data; rename the latter"),
    "fewer names": (["LABEL_0", "LABEL_1", "LABEL_2"], ["a", "b"], "3 labels without names, but the data has 2: a, b"),
}


@pytest.mark.parametrize("case", CASES)
def test_evaluation(case, tmp_path):
    own, names, expected = CASES[case]
    LunaConfig(**label_fields(own)).save_pretrained(tmp_path)
    training = SimpleNamespace(do_train=False, process_index=0)
    arguments = CheckpointArguments(str(tmp_path))
    if isinstance(expected, str):
        assert_error(match_labels, expected, arguments, names, training)
    else:
        labels = match_labels(arguments, names, training)
        assert labels.names == own and {name: labels.outputs[name] for name in names} == expected
