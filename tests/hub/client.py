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
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tests.distributed.ranks import PATIENCE
from tests.hub.loopback import TOKEN


class Client:
    """A Python process with its own Hub cache and token; `luna_mega` is importable if `package` is True."""

    def __init__(self, url: str, home: Path, package: bool = True):
        self.settings = {
            "HF_ENDPOINT": url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN,
            "NO_PROXY": "127.0.0.1",
        }
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=[package])

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `function` in the process."""
        value, error = self.attempt(function, *args, **kwargs)
        assert error is None, error
        return value

    def error(self, function: Callable, *args: Any, **kwargs: Any) -> str:
        """Return the exception that `function` raises in the process, as "Type: message"."""
        value, error = self.attempt(function, *args, **kwargs)
        assert error is not None, value
        return error

    def attempt(self, function: Callable, *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
        """Run `function` in the process; return (result, None), or (None, "Type: message") if it raises."""
        # the first call starts the process, which inherits these settings
        with mock.patch.dict(os.environ, self.settings):
            return self.pool.submit(_attempt, function, args, kwargs).result(timeout=PATIENCE)


def _start(package: bool) -> None:
    time.sleep = lambda seconds: None  # the client would wait before it retries
    # The module cache of the parent process would otherwise be found first.
    sys.path[:] = [path for path in sys.path if Path(path).name != "modules"]
    if package:
        importlib.import_module("luna_mega")
    else:
        sys.modules["luna_mega"] = None


def _attempt(function, args, kwargs):
    try:
        return function(*args, **kwargs), None
    except (Exception, SystemExit) as error:
        return None, f"{type(error).__name__}: {error}"


def push(folder: Path, repository: str, auto_class: str) -> None:
    """Push model and tokenizer, in two commits."""
    getattr(transformers, auto_class).from_pretrained(folder).push_to_hub(repository)
    AutoTokenizer.from_pretrained(folder).push_to_hub(repository)


def push_model(folder: Path, repository: str, **options: Any) -> None:
    AutoModelForSequenceClassification.from_pretrained(folder).push_to_hub(repository, **options)


def create(repository: str) -> None:
    HfApi().create_repo(repository)


def push_card(content: str, repository: str) -> None:
    # ModelCard.push_to_hub of huggingface_hub 1.x validates at huggingface.co, regardless of HF_ENDPOINT.
    HfApi().upload_file(path_or_fileobj=content.encode(), path_in_repo="README.md", repo_id=repository)


def push_folder(folder: Path, repository: str) -> None:
    HfApi().create_repo(repository, exist_ok=True)
    HfApi().upload_folder(repo_id=repository, folder_path=folder)


def encode(source: str | Path, texts: list[str], **options: Any) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(source, **options)(texts)["input_ids"]


def lists(inputs: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: value.tolist() for name, value in inputs.items()}


def outputs(source: str | Path, auto_class: str, inputs: dict[str, list], **options: Any) -> dict[str, Any]:
    """Return the name of the model class, its module, and all tensors of the model's output.

    `auto_class` is an Auto class, or the file and the name of a class of the folder.
    """
    kind = getattr(transformers, auto_class, None) or get_class_from_dynamic_module(auto_class, source)
    model = kind.from_pretrained(source, **options).eval()
    with torch.no_grad():
        output = model(**{name: torch.tensor(value) for name, value in inputs.items()})
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


def generate(source: str | Path, inputs: dict[str, list], settings: dict[str, Any], **options: Any) -> list[list[int]]:
    """Return the prompt and the tokens that a language model generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **options).eval()
    return model.generate(**{name: torch.tensor(value) for name, value in inputs.items()}, **settings).tolist()


def train(folder: Path, output: Path, publishes: bool = True, **options: Any) -> None:
    """Train for four steps with a checkpoint in the middle, as the scripts in examples/ do.

    If `publishes` is False, a plain `Trainer` pushes each checkpoint, but not the final model.
    """
    from transformers import Trainer, TrainingArguments  # slow imports, which the other process does not need

    from luna_mega.training.publishing import check_hub, complete_card, publish

    data = [{"input_ids": [0, 5 + index, 2], "labels": index % 2} for index in range(8)]
    arguments = TrainingArguments(
        output_dir=str(output),
        do_train=True,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        push_to_hub=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    check_hub(arguments)
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    if not publishes:
        return trainer._finish_current_push()
    trainer.evaluate()
    source = {"dataset": "nyu-mll/glue", "dataset_tags": "nyu-mll/glue", "dataset_args": "sst2"}
    complete_card(trainer, str(folder), "other:my-license", source)
    publish(trainer)


def train_without_token(*args: Any) -> None:
    token = os.environ.pop("HF_TOKEN")
    try:
        train(*args)
    finally:
        os.environ["HF_TOKEN"] = token


def save_again(source: Path, auto_class: str, output: Path, new: Path) -> None:
    """Save a model that is loaded with its code, and the configuration of a new one of its class."""
    model = getattr(transformers, auto_class).from_pretrained(source, trust_remote_code=True)
    model.save_pretrained(output)
    type(model.config)().save_pretrained(new)


def push_by_trainer(source: Path, auto_class: str, output: Path, repository: str) -> None:
    """Push a model and its tokenizer with `Trainer.push_to_hub`."""
    from transformers import Trainer, TrainingArguments

    model, tokenizer = getattr(transformers, auto_class).from_pretrained(source), AutoTokenizer.from_pretrained(source)
    arguments = TrainingArguments(output_dir=str(output), hub_model_id=repository, report_to="none", use_cpu=True)
    Trainer(model, arguments, processing_class=tokenizer).push_to_hub()


def push_config(source: Path, output: Path, repository: str) -> None:
    AutoConfig.from_pretrained(source).save_pretrained(output, push_to_hub=True, repo_id=repository)


def model_type_of(source: str, **options: Any) -> str:
    return AutoConfig.from_pretrained(source, **options).model_type


def run_code(code: str) -> str:
    """Run code that creates a `model`; return the module of its class."""
    scope: dict[str, Any] = {}
    exec(code, scope)
    return type(scope["model"]).__module__


def gradients_with_other_bundles(folders: list[Path], inputs: dict[str, list]) -> list[tuple[str, bool]]:
    """Compile the masked LM of the first bundle, then load the other bundles, and the first one with the package.

    Returns:
        For each model, and again for the compiled one: the module of its class, and whether its gradients equal
        those of the first model before the others were loaded.
    """
    import luna_mega

    def gradients(model, run):
        model.zero_grad()
        run(**{name: torch.tensor(value) for name, value in inputs.items()}).logits.sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def load(folder):
        return (
            get_class_from_dynamic_module("luna_mega_code/auto_luna.LunaForMaskedLM", folder)
            .from_pretrained(folder)
            .eval()
        )

    first = load(folders[0])
    compiled = torch.compile(first, backend="eager", fullgraph=True)
    wanted = gradients(first, compiled)
    models = [first, *map(load, folders[1:]), luna_mega.LunaForMaskedLM.from_pretrained(folders[0]).eval()]
    found = [(model, gradients(model, run)) for model, run in [*zip(models, models, strict=True), (first, compiled)]]
    return [(type(model).__module__, all(map(torch.allclose, got, wanted))) for model, got in found]


def load_with_versions(source: Path, auto_class: str, versions: dict[str, str], removes: bool) -> str:
    """Load a folder as if other versions were installed; return the name of the class, or "Type: message".

    With `removes`, transformers has none of the names that its versions differ in.
    """
    module = importlib.import_module("transformers.utils.output_capturing")
    names = ("OutputRecorder", "capture_outputs", "selected_hidden_states") if removes else ()
    real = importlib.metadata.version
    with mock.patch.object(importlib.metadata, "version", lambda name: versions.get(name) or real(name)):
        kept = {name: vars(module).pop(name) for name in names}
        try:
            model = getattr(transformers, auto_class).from_pretrained(source, trust_remote_code=True)
            return type(model).__name__
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            vars(module).update(kept)
