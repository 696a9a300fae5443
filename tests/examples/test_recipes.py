"""Recipes: every option and model field exists and is used. Scripts: every one supports --help."""

import ast
import functools
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from luna_mega import MegaConfig
from luna_mega.training.images import make_sampler
from luna_mega.training.models import label_fields, make_config
from luna_mega.training.tokenizers import make_bytes, train_words
from luna_mega.training.trainer import EpochCallback
from tests.examples.conftest import EXAMPLES, ROOT
from tests.examples.runs import assert_error

RECIPES = sorted((EXAMPLES / "recipes").rglob("*.yaml"))


@functools.cache
def words(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of this number of words."""
    return train_words([f"w{word}" for word in range(size)], 10**6)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that returns the script and the options of a recipe, even if timm is not installed."""

    def options_of(path: Path) -> tuple[str, list[str]]:
        monkeypatch.setattr("luna_mega.training.images._timm", lambda: None)
        task = {"csqa": "race", "recipes": "mlm"}.get(path.parent.name, path.parent.name)
        source = [] if task in ("glue", "race") else ["--dataset_path", str(tmp_path)]
        options = ["--recipe", str(path), "--output_dir", str(tmp_path), *source, "--bf16", "false"]
        if "pretrained" in path.stem or "continued" in path.stem:
            options += ["--model_name_or_path", str(tmp_path)]
        if path.stem.startswith("pretrained") or (task, path.stem) == ("glue", "table9"):
            options += ["--task_name", "rte"]
        return "lra.run_lra" if task == "lra" else f"run_{task}", options

    return options_of


@pytest.fixture
def parsed(script, command):
    """Return a function that parses a recipe with its script."""

    def parse(path: Path) -> SimpleNamespace:
        name, options = command(path)
        data, model, training, _ = script(name).parse(options)
        return SimpleNamespace(data=data, model=model, training=training)

    return parse


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipe_is_complete(path, parsed):
    task = parsed(path)
    assert task.training.do_train and task.training.do_eval
    text = path.read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    if base := recipe.pop("recipe", None):
        assert (path.parent / base).resolve().is_relative_to(ROOT)
        recipe = yaml.safe_load((path.parent / base).read_text(encoding="utf-8")) | recipe
        text = text.replace(base, "")
    assert "../" not in text  # refers to nothing outside of the repository
    assert recipe.get("bf16", "auto") == "auto" and not {"fp16", "use_cpu"} & recipe.keys()  # fits any machine
    for name, value in recipe.items():
        holder = next(arguments for arguments in vars(task).values() if hasattr(arguments, name))
        found = getattr(holder, name)
        assert found == (float(value) if isinstance(found, float) else value) or name == "bf16", name
    assert f"--recipe {path.relative_to(ROOT)}" in text.split("\n\n")[0]  # the command of the header
    if re.match(r"table|readme|qnli|qqp|sst2$|wmt|enwik8|wikitext103|speech", path.stem):
        assert task.model.decay_all_weights  # as fairseq does
    # a new model of a paper has the initialization of the original, stated in the recipe or in a preset
    if re.match(r"table8|wmt|enwik8|wikitext103|speech_commands|imagenet", path.stem):
        value = "0.03125" if path.stem.startswith("wmt14") else "0.02"  # Xavier with gain 1 / sqrt(2) and d = 512
        overrides = re.split(r",\s*", task.model.config_overrides)
        assert not task.model.model_name_or_path and f"initializer_range={value}" in overrides
    if path.parent.name in ("glue", "race", "csqa", "lra"):
        names = re.sub("pretrained|table9", "rte", path.stem.split("_")[0]), path.parent.name
        assert task.data.task_name == names[path.parent.name in ("race", "csqa")]


CPUS = {  # instructions -> whether `true` and `auto` train in bfloat16; None = an error
    ("avx2",): (None, False),
    ("avx512_bw",): (True, False),
    ("avx512_bw", "avx512_bf16"): (True, True),
    ("amx_bf16",): (True, True),
    ("bf16",): (True, False),
}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="bfloat16 of the accelerator")
@pytest.mark.parametrize("flags", CPUS, ids=lambda flags: flags[-1])
def test_bf16_on_a_cpu(script, tmp_path, monkeypatch, flags):
    """`auto`, also in a recipe, requires units for bfloat16; `true` is an error if it would be emulated slowly."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: dict.fromkeys(flags, True))
    (tmp_path / "recipe.yaml").write_text("bf16: auto\n", encoding="utf-8")
    options = ["--task_name", "sst2", "--do_train", "--output_dir", str(tmp_path / "out")]
    for more, expected in zip((["--bf16", "true"], ["--recipe", f"{tmp_path}/recipe.yaml"]), CPUS[flags], strict=True):
        if expected is None:
            message = "--bf16: this CPU has neither AVX-512 nor AMX and is far slower in bfloat16; pass --bf16 auto"
            assert_error(script("run_glue").parse, message, [*options, *more])
        else:
            training = script("run_glue").parse([*options, *more])[2]
            assert training.bf16 is expected and training.use_cpu


def make_config_of(path: Path, task: SimpleNamespace, script) -> tuple[type, PreTrainedConfig]:
    """Return the Auto class and the configuration of the new model of a recipe."""
    kind, data, model = path.parent.name, task.data, task.model
    if kind == "clm":
        tokenizer = make_bytes() if data.tokenization == "byte" else words(model.vocab_size)
        return AutoModelForCausalLM, make_config(model, tokenizer, data.block_size, **script("run_clm").DECODER)
    if kind == "translation":
        start = {"is_encoder_decoder": True, "decoder_start_token_id": 2}
        return AutoModelForSeq2SeqLM, make_config(model, words(model.vocab_size), data.max_source_length, **start)
    if kind == "audio":
        labels = label_fields("0123456789")
        return AutoModelForSequenceClassification, make_config(model, None, 16_000, **labels)
    if kind == "lra":
        names = tuple(map(str, range(script("lra.tasks").TASKS[data.task_name].classes)))
        tokenizer = None if data.pixels == "values" and "image" in str(path) or "path" in str(path) else make_bytes()
        return AutoModelForSequenceClassification, script("lra.run_lra").choose_config(data, model, tokenizer, names)
    autos = {"glue": AutoModelForSequenceClassification, "mlm": AutoModelForMaskedLM}
    return autos.get(kind, AutoModelForMultipleChoice), make_config(model, words(model.vocab_size), data.max_seq_length)


PRESETS = {  # of papers; other fields than those of the data and the vocabulary are equal
    "wikitext103_mega": MegaConfig.lm_wikitext103,
    "enwik8_mega": MegaConfig.lm_enwik8,
    "speech_commands_mega_base": MegaConfig.sc_base,
    "speech_commands_mega_big": MegaConfig.sc_big,
    "image_mega": MegaConfig.lra_image,
    "pathfinder_mega": MegaConfig.lra_pathfinder,
    "pathx_mega": MegaConfig.lra_pathfinder128,
}
OF_THE_DATA = {"vocab_size", "label2id", "id2label", "problem_type"}
NEW = [path for path in RECIPES if not re.search("pretrained|continued|image_classification|table9", str(path))]


@pytest.mark.parametrize("path", NEW, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_model_of_a_recipe(path, parsed, script):
    """A new model can be made; it has the fields of the preset of its paper, or the sizes that a page compares."""
    auto, config = make_config_of(path, parsed(path), script)
    if path.stem in PRESETS:
        preset, found = PRESETS[path.stem]().to_dict(), config.to_dict()
        different = {field for field, value in preset.items() if found[field] != value}
        assert different <= {f"{name}_token_id" for name in ("bos", "eos", "pad")} | OF_THE_DATA
    if path.stem == "wikitext103_mega":
        assert config.adaptive_softmax_cutoffs == config.adaptive_input_cutoffs
    if path.parent.name == "clm":
        assert parsed(path).data.block_size % getattr(config, "attention_chunk", 1) == 0
        if path.stem.startswith("compare"):
            config.vocab_size = 66  # the number of characters in Shakespeare, plus three special tokens
    with torch.device("meta"):
        parameters = auto.from_config(config).num_parameters()
    if path.parent.name == "clm" and path.stem.startswith("compare"):
        assert parameters == pytest.approx(2.46e6, rel=0.01)
    assert not path.stem.startswith("multi30k") or parameters < 12e6


PRINTED = yaml.safe_load((ROOT / "tests" / "papers" / "tables.yaml").read_text(encoding="utf-8"))
NOTES = ("page", "gpus", "rows", "readme", "here")  # keys of a recipe that are no printed values


def printed_values(name: str) -> dict[str, Any]:
    return {field: value for field, value in PRINTED[name].items() if field not in NOTES}


@pytest.mark.parametrize("page", ["luna", "mega"])
def test_page_has_the_differences_of_its_recipes(page):
    """The table of the section "Recipes" has the values of `here`, and its first sentence the numbers of values."""
    recipes = [name for name, given in PRINTED.items() if given["page"] == page]
    differences = {
        (f"`{name}.yaml`", f"`{field}`", PRINTED[name][field], value)
        for name in recipes
        for field, value in PRINTED[name].get("here", {}).items()
    }
    numbers = sum(len(printed_values(name)) for name in recipes), len(recipes), len(differences)
    text = (ROOT / "docs" / "papers" / f"{page}.md").read_text(encoding="utf-8")
    section = re.search(r"^## Recipes\n\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)[1]
    assert section.startswith("{} printed values of {} recipes are compared; {} differ:".format(*numbers)), numbers
    rows = [tuple(re.split(r" *\| *", line)[1:-1]) for line in section.splitlines() if line.startswith("|")]
    assert rows[0] == ("recipe", "value", "paper", "here", "reason") and all(row[-1] for row in rows)
    values = [[float(text.replace(",", "")) if text[0].isdigit() else text for text in row[2:4]] for row in rows[2:]]
    assert len(rows) - 2 == len(differences)
    assert {(*row[:2], *pair) for row, pair in zip(rows[2:], values, strict=True)} == differences


@pytest.mark.parametrize("name", PRINTED)
def test_recipe_has_the_printed_hyperparameters(name, parsed, script):
    """Values that differ from the paper are those that `here` states."""
    given, path = PRINTED[name], EXAMPLES / "recipes" / f"{name}.yaml"
    task = parsed(path)
    training = task.training
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * given.get("gpus", 1)
    found = {"batch": batch, "schedule": training.lr_scheduler_type}
    found["epochs"] = round(training.max_steps * batch / given.get("rows", 1))
    found["warmup_epochs"] = round(training.num_train_epochs * training.warmup_steps, 3)
    overrides = yaml.safe_load("{" + task.model.config_overrides.replace("=", ": ") + "}")
    if path.parent.name == "lra":
        overrides |= make_config_of(path, task, script)[1].to_dict()
    elif path.parent.name == "audio":
        overrides = MegaConfig(**overrides).to_dict()
    for field, value in (printed_values(name) | given.get("readme", {}) | given.get("here", {})).items():
        holder = next((each for each in vars(task).values() if hasattr(each, field)), None)
        actual = found.get(field, overrides.get(field) if holder is None else getattr(holder, field))
        assert actual == value, field
    assert all(given[field] != value for field, value in given.get("here", {}).items())


def repeated_samples(dataset: list, **options: int) -> range:
    """Mock of timm's RepeatAugSampler, with its length: `test_an_epoch_of_repeated_augmentation`."""
    return range(len(dataset) // 256 * 256)


TIMM = SimpleNamespace(
    Mixup=lambda *args, **options: None, distributed_sampler=SimpleNamespace(RepeatAugSampler=repeated_samples)
)


class Started(Exception):
    """A run is about to train; its arguments are the model, the optimizer, the schedule, and the number of steps."""


@pytest.fixture
def start(script, command, monkeypatch):
    """Return a function that runs a recipe until its first step, with a model of one layer and `rows` examples."""

    def run(path: Path, rows: int, gpus: int) -> Started:
        name, options = command(path)
        module = script(name)
        example = {"input_ids": [1], "labels": 1, "length": 2, "lengths": (1, 1)}
        examples = Dataset.from_dict({name: [value] * rows for name, value in example.items()})
        splits = {"train": examples, "validation": Dataset.from_dict({"id": ["0"], "example_id": ["0"]})}

        def load_data(data, model, training):
            training.per_device_train_batch_size *= gpus
            training.dataloader_num_workers = 0
            model.vocab_size = 61_000 if "cutoffs" in model.config_overrides else 64
            kind, tokenizer = path.parent.name, words(model.vocab_size)
            if kind == "clm":
                return dict.fromkeys(splits, torch.zeros(9000, dtype=torch.long)), tokenizer
            if kind == "image_classification":
                return splits, None, module.choose_config(data, model, 224, 3, ["0", "1"])[0]
            config = make_config_of(path, SimpleNamespace(data=data, model=model), script)[1]
            both = module.lib.Tokenizers(tokenizer, tokenizer)
            processor = {"audio": None, "translation": both}.get(kind, tokenizer)
            return splits, processor, config, *([range(2)] if kind == "glue" else [])

        def make_model(auto, model, config):
            config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 1})
            return getattr(auto, "from_config", auto)(config)

        def stop(callback, args, state, control, *, model, optimizer, lr_scheduler, **kwargs):
            raise Started(model, optimizer, lr_scheduler, state.max_steps)

        monkeypatch.setattr("luna_mega.training.images._timm", lambda: TIMM)
        monkeypatch.setattr(module, "load_data", load_data)
        monkeypatch.setattr(module.lib, "make_model", make_model)
        monkeypatch.setattr(EpochCallback, "on_train_begin", stop)
        with pytest.raises(Started) as started:
            module.main(options)
        return started.value

    return run


def printed_rates(steps: np.ndarray, total: int, warmup: int, printed: dict[str, Any]) -> np.ndarray:
    """Return the learning rates of `steps`, which count from 0, in a run of `total` steps."""
    peak, first = printed["learning_rate"], printed.get("warmup_init_lr", 0.0)
    rising = first + (peak - first) * (steps / warmup) ** printed.get("warmup_power", 1)
    left = (total - steps) / (total - warmup)
    reached = (steps[:, None] >= np.array(printed.get("milestones", []))).sum(1)
    falling = {
        "linear": left,
        "cosine": (1 + np.cos(np.pi * (1 - left))) / 2,
        "inverse_sqrt": np.sqrt(warmup / np.maximum(steps, 1)),
        "constant_with_warmup": printed.get("milestone_factor", 1.0) ** reached,
    }
    return np.where(steps < warmup, rising, peak * falling[printed["schedule"]])


@pytest.mark.parametrize("name", PRINTED)
def test_run_has_the_printed_schedule_and_weight_decay(name, start):
    """The learning rates of a run are the printed ones, and all parameters have weight decay."""
    given, rows = PRINTED[name], PRINTED[name].get("rows", 1000)
    printed = printed_values(name) | given.get("readme", {}) | given.get("here", {})
    model, optimizer, schedule, total = start(EXAMPLES / "recipes" / f"{name}.yaml", rows, given.get("gpus", 1)).args
    if epochs := printed.get("num_train_epochs"):
        # mixup omits the incomplete batch
        assert total == epochs * (math.floor if "mixup" in printed else math.ceil)(rows / printed["batch"])
    else:
        assert total == printed["max_steps"]

    warmup = printed["warmup_steps"] if "warmup_steps" in printed else printed["warmup_epochs"] / epochs
    warmup = math.ceil(total * warmup) if warmup < 1 else warmup
    bounds = [0, warmup, *printed.get("milestones", []), total]
    steps = [*range(0, total, 1 + total // 1000), *(bound + shift for bound in bounds for shift in range(-3, 4))]
    steps = np.unique(np.clip(steps, 0, total - 1))
    expected = printed_rates(steps, total, warmup, printed)
    assert {group["lr"] for group in optimizer.param_groups} == {expected[0]}
    for peak, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True):
        np.testing.assert_allclose([peak * factor(int(step)) for step in steps], expected, rtol=1e-9)

    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    trained = {path: groups[id(value)] for path, value in model.named_parameters() if value.requires_grad}
    spared = {path for path in trained if re.search(r"\.bias$|norm\.weight$|position_embeddings$", path)}
    assert spared
    if not name.startswith("image"):  # only the original code for images has parameters without weight decay
        spared = set()
    decays = {path: group["weight_decay"] for path, group in trained.items()}
    assert decays == {path: 0.0 if path in spared else printed["weight_decay"] for path in trained}


def test_an_epoch_of_repeated_augmentation():
    """It has as many examples as without repetition."""
    pytest.importorskip("timm")
    sampler = make_sampler(range(1000), 3)
    assert len(sampler) == len(list(sampler)) == 768 and len(set(sampler)) == 256


@pytest.mark.parametrize(
    "path", [*sorted(EXAMPLES.glob("*.py")), EXAMPLES / "lra" / "run_lra.py"], ids=lambda path: path.stem
)
def test_script_answers_help(path, script, monkeypatch, capsys):
    """The help has the sentence of the script, then its own options, then those of Trainer, in one spelling."""
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    assert error.value.code == 0 and text.startswith(f"usage: {path.name} ")
    sentence = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n")[0]
    groups = [sentence, *(name for name in ("\ndata and task:", "\nmodel:", "\noptions of ") if name in text)]
    assert [text.index(name) for name in groups] == sorted(text.index(name) for name in groups)
    assert not re.findall(r"^ +--\w+-[\w-]+", text, re.MULTILINE) and "default: None" not in text
    if "\noptions of " in text:
        assert len(groups) == 4 and "--output_dir" in text.split("\noptions of ")[1]


@pytest.mark.parametrize("family", ["luna", "mega"])
@pytest.mark.parametrize("task", ["race", "csqa"])
def test_small_recipes_fit_both_families(task, family, script, tmp_path):
    """Only a new model has the sizes of the recipe; both have its dropout."""
    AutoConfig.for_model(family, vocab_size=400, hidden_size=24).save_pretrained(tmp_path / "model")
    recipe = ["--recipe", str(EXAMPLES / "recipes" / task / f"{task}_small.yaml"), "--output_dir", str(tmp_path)]
    for size, more in ((128, ["--model_type", family]), (24, ["--model_name_or_path", str(tmp_path / "model")])):
        data, model, _, _ = script("run_race").parse([*recipe, "--use_cpu", *more])
        config = make_config(model, words(256), data.max_seq_length)
        assert (config.model_type, config.hidden_size, config.pooling) == (family, size, "mean")
        assert (config.dropout, config.attention_dropout) == (0.1, 0.1)
