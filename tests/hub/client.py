"""Client processes: huggingface_hub reads its settings at import, and bundles must load without `luna_mega`.

The functions after `Client` run in these processes.
"""

import importlib
import importlib.metadata
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from huggingface_hub import HfApi
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tests.distributed.ranks import PATIENCE
from tests.hub.server import LoopbackHub


class Client:
    """A Python process with its own Hub cache and token; `luna_mega` is importable if `package` is True.

    Packages in the folder `before` take precedence over the installed ones.
    """

    def __init__(self, server: LoopbackHub, home: Path, package: bool = True, before: Path | None = None):
        self.path = [str(before)] if before else []
        self.settings = {**server.settings(), "HF_HOME": str(home)}
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=[package])

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `function` in the process."""
        # the first call starts the process, which inherits these settings
        with mock.patch.dict(os.environ, self.settings), mock.patch.object(sys, "path", [*self.path, *sys.path]):
            return self.pool.submit(function, *args, **kwargs).result(timeout=PATIENCE)

    def error(self, function: Callable, *args: Any, **kwargs: Any) -> str:
        """Return the exception that `function` raises in the process, as "Type: message"."""
        return self(_error_of, function, args, kwargs)


def _error_of(function, args, kwargs):
    try:
        raise AssertionError(function(*args, **kwargs))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def _start(package: bool) -> None:
    time.sleep = lambda seconds: None  # the client would wait before it retries
    # The module cache of the parent process would otherwise be found first.
    sys.path[:] = [path for path in sys.path if Path(path).name != "modules"]
    if package:
        importlib.import_module("luna_mega")
    else:
        sys.modules["luna_mega"] = None


def push(folder: Path, repository: str, auto_class: str) -> None:
    """Push model and tokenizer, in two commits, to a repository that has the card of the folder."""
    HfApi().create_repo(repository)
    # ModelCard.push_to_hub of huggingface_hub 1.x validates at huggingface.co, regardless of HF_ENDPOINT.
    HfApi().upload_file(path_or_fileobj=folder / "README.md", path_in_repo="README.md", repo_id=repository)
    getattr(transformers, auto_class).from_pretrained(folder).push_to_hub(repository)
    AutoTokenizer.from_pretrained(folder).push_to_hub(repository)


def upload(folder: Path, repository: str) -> None:
    """Do what `hf upload` does with a folder."""
    HfApi().upload_folder(repo_id=repository, folder_path=folder)


def encode(source: str | Path, texts: list[str], **options: Any) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(source, **options)(texts)["input_ids"]


def lists(inputs: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: value.tolist() for name, value in inputs.items()}


def load(source: str | Path, auto_class: str, **options: Any) -> torch.nn.Module:
    """Load a model by an Auto class, or by the file and the name of a class of the folder."""
    kind = getattr(transformers, auto_class, None) or get_class_from_dynamic_module(auto_class, source)
    return kind.from_pretrained(source, **options).eval()


def outputs(
    source: str | Path, auto_class: str, inputs: dict[str, list], compiled: bool = False, **options: Any
) -> dict[str, Any]:
    """Return the name of the model class, its module, and all tensors of the model's output."""
    model = load(source, auto_class, **options)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        output = run(**{name: torch.tensor(value) for name, value in inputs.items()})
    tensors = {name: value.tolist() for name, value in output.items() if isinstance(value, torch.Tensor)}
    return {"class": type(model).__name__, "module": type(model).__module__, **tensors}


def check_outputs(
    result: dict[str, Any], model: torch.nn.Module, inputs: dict[str, torch.Tensor], package: bool = False
) -> None:
    """Check that a result of `outputs` is equal up to rounding, and from the code of the folder or of the package."""
    module = result["module"]
    ours = module.startswith("luna_mega.")
    theirs = module.startswith("transformers_modules.") and ".luna_mega_code." in module
    assert ours if package else theirs, module
    assert result["class"] == type(model).__name__
    with torch.no_grad():
        expected = {name: value for name, value in model(**inputs).items() if isinstance(value, torch.Tensor)}
    assert expected
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(result[name], dtype=value.dtype), value)


def generate(source: str | Path, auto_class: str, inputs: dict[str, list], settings: dict, **options: Any) -> list:
    """Return the prompt and the tokens that a model generates."""
    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    return load(source, auto_class, **options).generate(**inputs, **settings).tolist()


def train(folder: Path, output: Path, repository: str, script: bool = True, always: bool = False) -> None:
    """Train for four steps with a checkpoint in the middle, and push as the scripts in examples/ or as `Trainer` does.

    If `always` is True, push each checkpoint, and not the final model.
    """
    from transformers import Trainer, TrainingArguments  # slow imports, which the other process does not need

    from luna_mega.cards import complete_trainer_card
    from luna_mega.training.runs import check_hub, publish

    data = [{"input_ids": [0, 5 + index, 2], "labels": index % 2} for index in range(8)]
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}
    options |= {"push_to_hub": True, "hub_model_id": repository, "hub_always_push": always, "disable_tqdm": True}
    options["hub_strategy"] = "every_save" if always else "end"
    check_hub(arguments := TrainingArguments(str(output), **options))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    trainer.train()
    if always:
        return trainer._finish_current_push()
    if not script:
        return trainer.push_to_hub()
    trainer.evaluate()
    source = {"dataset": "nyu-mll/glue", "dataset_tags": "nyu-mll/glue", "dataset_args": "sst2"}
    complete_trainer_card(trainer, str(folder), "other:my-license", source)
    publish(trainer)


def save_again(source: Path, auto_class: str, output: Path, new: Path) -> None:
    """Save a model that is loaded with its code, and the configuration of a new one of its class."""
    model = load(source, auto_class, trust_remote_code=True)
    model.save_pretrained(output)
    type(model.config)().save_pretrained(new)


def run_code(code: str) -> str:
    """Run code that creates a `model`; return the module of its class."""
    scope: dict[str, Any] = {}
    exec(code, scope)
    return type(scope["model"]).__module__


def load_with_versions(source: Path, auto_class: str, versions: dict[str, str], removed: list[str]) -> str:
    """Load a folder as if other versions were installed; return the name of the class.

    The names in `removed` are then absent in transformers.
    """
    module = importlib.import_module("transformers.utils.output_capturing")
    real = importlib.metadata.version
    with mock.patch.object(importlib.metadata, "version", lambda name: versions.get(name) or real(name)):
        kept = {name: vars(module).pop(name) for name in removed}
        try:
            return type(load(source, auto_class, trust_remote_code=True)).__name__
        finally:
            vars(module).update(kept)
