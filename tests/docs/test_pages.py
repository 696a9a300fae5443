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
import luna_mega_cli
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
    """The blocks of a page run one after the other in one session, and those of `docs/operators.md` each alone."""
    monkeypatch.setattr(registry, "_FORMATS", registry._FORMATS.copy())
    monkeypatch.setattr(transformers.TrainingArguments, "__init__", short_training(transformers.TrainingArguments))
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


@pytest.mark.parametrize("offline_data", [True, False])
def test_notebook(offline_data, monkeypatch):
    """The cells run in their order: with generated sentences, from which the model learns, and with the stand-ins."""
    notebook = json.loads((ROOT / "examples" / "glue.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    first, *sources = ("".join(cell["source"]) for cell in code)
    assert first == "OFFLINE = False"
    if not offline_data:
        monkeypatch.setattr(transformers.TrainingArguments, "__init__", short_training(transformers.TrainingArguments))
    given = {"OFFLINE": offline_data}
    for source in sources:
        exec(compile(source, "glue.ipynb", "exec"), given)
    labels = [prediction["label"] for prediction in given["predictions"]]
    if offline_data:
        assert given["metrics"]["eval_accuracy"] > 0.9 and labels == ["LABEL_1", "LABEL_0"]
    else:
        assert given["model"].config.model_type == "mega" and len(labels) == 2


def short_training(arguments: type):
    """Return an `__init__` of `TrainingArguments` that limits every training to two steps on the CPU."""
    begin = arguments.__init__

    def begin_short(self, *positional, **options):
        begin(self, *positional, **options | {"max_steps": 2, "use_cpu": True, "report_to": "none"})

    return begin_short


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL}))
def test_shell(page):
    """Every command has a program, options and files that exist."""
    missing = set()
    for command in (command for block in SHELL if block.page == page for command in block.commands()):
        try:
            check_command(*command)
        except pytest.skip.Exception as skipped:
            missing.add(str(skipped))
    if missing:
        pytest.skip("; ".join(sorted(missing)))


def test_commands_in_tables_of_the_readme(tmp_path, capsys):
    """`luna-mega` runs with a small checkpoint, and scripts parse their options."""
    spans = re.findall(r"`((?:luna-mega|python) [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    for program, *words in map(str.split, spans):
        if program == "luna-mega" and "--output" in words:
            places = {"FILE": "checkpoint_best.pt", "DIR": str(tmp_path / "new")}
            assert luna_mega_cli.main([places.get(word, word) for word in words]) == 0, capsys.readouterr().err
        elif program == "python":
            check_command(program, *words)
    assert len(spans) == 4


def test_languages_of_blocks():
    """A block of another language would not be run."""
    assert {block.language for block in BLOCKS} <= {"text", "python", "bash", "bibtex"}
