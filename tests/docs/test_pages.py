"""Every code block of README, docs and examples runs offline on small data, or states why it is not run.

Programs of shell blocks do not run: their options and files exist.
"""

import json
import re

import datasets.config
import huggingface_hub.constants
import pytest
import torch
import transformers
from transformers import AutoModelForMaskedLM, AutoTokenizer, TrainingArguments

import luna_mega
from luna_mega.convert.formats import registry
from tests.docs import world
from tests.docs.blocks import PAGES, ROOT, check_command, read

BLOCKS = [block for page in PAGES for block in read(page)]
ALONE = {"README.md", "docs/operators.md"}  # readers copy blocks of these pages into empty files
SHELL = [block for block in BLOCKS if block.language == "bash" and block.reason is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world.make(tmp_path_factory.mktemp("pages"))


@pytest.fixture(autouse=True)
def offline(folder, monkeypatch):
    """Replace names on the Hub by folders of the working directory, and disable access to the Hub."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / ".datasets")


def session(page: str) -> dict:
    """Return the variables that a page assumes: a model, its tokenizer and inputs."""
    if page in ALONE:
        return {}
    name = "luna-base"
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = ["a text", "another text"]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
    given = {"luna_mega": luna_mega, "AutoTokenizer": AutoTokenizer, "tokenizer": tokenizer, "folder": name}
    given |= {"texts": texts, "text": "a b", "inputs": inputs, "torch": torch}
    given["model"] = AutoModelForMaskedLM.from_pretrained("luna-base").eval()
    given["args"] = TrainingArguments("out", use_cpu=True)
    given["tokenized"] = [{"input_ids": [5, 6, 7]}]
    return given


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" for b in read(page))])
def test_python(page, monkeypatch):
    """The blocks of a page run one after the other in one session; each block of `docs/operators.md` has a new one."""
    monkeypatch.setattr(registry, "_FORMATS", registry._FORMATS.copy())
    monkeypatch.setattr(transformers.TrainingArguments, "__init__", short_training(transformers.TrainingArguments))
    monkeypatch.setattr(transformers.Trainer, "push_to_hub", transformers.Trainer.save_model)  # pushes are in tests/hub
    given = session(page)
    for block in read(page):
        if page == "docs/operators.md":
            given = {}
        if block.language == "python" and block.reason is None:
            try:
                block.run(given)
            except ModuleNotFoundError as error:
                assert not error.name.startswith("luna_mega"), block
                pytest.importorskip(error.name)
                raise


def test_notebook():
    """The cells run in their order with generated sentences, from which the model learns."""
    notebook = json.loads((ROOT / "examples" / "glue.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    first, *sources = ("".join(cell["source"]) for cell in code)
    assert first == "OFFLINE = False"
    given = {"OFFLINE": True}
    for source in sources:
        exec(compile(source, "glue.ipynb", "exec"), given)
    assert given["metrics"]["eval_accuracy"] > 0.9
    assert [prediction["label"] for prediction in given["predictions"]] == ["LABEL_1", "LABEL_0"]


def short_training(arguments: type):
    """Return an `__init__` of `TrainingArguments` that limits every training to two steps on the CPU."""
    begin = arguments.__init__

    def begin_short(self, *positional, **options):
        begin(self, *positional, **options | {"max_steps": 2, "use_cpu": True, "report_to": "none"})

    return begin_short


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL}))
def test_shell(page):
    """Every command has a program, options and files that exist; also in the tables of README.md."""
    calls = [command for block in SHELL if block.page == page for command in block.commands()]
    if page == "README.md":
        spans = re.findall(r"`((?:luna-mega|python) [^`]+)`", (ROOT / page).read_text(encoding="utf-8"))
        calls += map(str.split, spans)
    missing = set()
    for command in calls:
        try:
            check_command(*command)
        except pytest.skip.Exception as skipped:
            missing.add(str(skipped))
    if missing:
        pytest.skip("; ".join(sorted(missing)))


def test_languages_of_blocks():
    """A block of another language would not be run."""
    assert {block.language for block in BLOCKS} <= {"text", "python", "bash", "bibtex"}
