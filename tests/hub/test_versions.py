"""A saved folder under other versions of transformers, torch and this package loads, or a message says what to do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

import luna_mega
import luna_mega_cli
from luna_mega import _cards, _code, compat
from luna_mega.modeling_common.configuration import CODE_FOLDER
from tests.hub import client as on_client
from tests.hub.contract import make
from tests.hub.test_card import converted

pytestmark = pytest.mark.usefixtures("with_code")
NEEDS = "requires transformers 5.22 or later and is tested with torch 2.11 or later:"
RUNS = ("5.22.2", "5.23.0")  # REQUIRED begins with the first; an earlier one is not tested


@pytest.mark.parametrize(
    ("versions", "error"),
    [
        ({"transformers": "5.21.1"}, "transformers 5.22 or later, but 5.21.1 is installed"),
        ({"transformers": "4.57.6"}, "transformers 5.22 or later, but 4.57.6 is installed"),
        ({"torch": "2.6.0"}, "torch 2.7 or later, but 2.6.0 is installed"),  # with which a run failed
        ({"transformers": "5.22.0.dev0", "torch": "2.8.0+cpu"}, None),
        ({"transformers": "99.0", "torch": "99.0"}, None),
    ],
)
def test_entry_file_checks_the_versions_first(stranger, tmp_path, versions, error):
    """No other file of the code is imported before the check: transformers then has none of the undocumented names."""
    make("luna").save_pretrained(tmp_path)
    found = stranger(
        on_client.load_with_versions, tmp_path, "AutoModelForMaskedLM", versions, removes=error is not None
    )
    assert error is None or error in found and found.startswith("ImportError: ") and "\n" not in found
    assert error is not None or found == "LunaForMaskedLM"


def write_version(folder, version):
    for file in (folder / CODE_FOLDER).iterdir():
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(rf"(?<={_code.GENERATED})[\d.]+\d", version, text), encoding="utf-8")


def load(folder, caplog):
    """Load a folder in two ways; return the messages about its code."""
    caplog.clear()
    AutoModelForMaskedLM.from_pretrained(folder)
    luna_mega.LunaForMaskedLM.from_pretrained(folder.parent, subfolder=folder.name)
    return [record.getMessage() for record in caplog.records if record.name == _code.__name__]


def test_old_code_is_logged_and_renewed(tmp_path, caplog):
    """One line for a folder with code of an earlier version, which `luna-mega bundle` renews, and its card too."""
    (folder := tmp_path / "folder").mkdir()
    make("luna").save_pretrained(folder)
    assert load(folder, caplog) == []
    card = f"# Old\n\nWithout luna-mega, transformers runs the code in `{CODE_FOLDER}`:\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_version(folder, "0.5.0")
    (message,) = load(folder, caplog)
    assert "contains code of luna-mega 0.5.0" in message and f"run `luna-mega bundle {folder}`" in message
    assert luna_mega_cli.main(["bundle", str(folder)]) == 0
    assert load(folder, caplog) == []
    text = (folder / CODE_FOLDER / "auto_luna.py").read_text(encoding="utf-8")
    assert text.startswith(f"{_code.GENERATED}{luna_mega.__version__}. ")
    assert NEEDS in (folder / "README.md").read_text(encoding="utf-8")


def test_newer_code_warns_once(tmp_path, caplog):
    for name in ("first", "second"):
        make("luna").save_pretrained(tmp_path / name)
        write_version(tmp_path / name, "77.1.0")
    (message,) = [*load(tmp_path / "first", caplog), *load(tmp_path / "second", caplog)]
    assert "code of luna-mega 77.1.0, but luna-mega" in message and "install that version" in message


def run(folder, path=""):
    """Return what program.py prints in a process without the package."""
    environment = os.environ | {"PYTHONPATH": str(path), "HF_HOME": str(folder.parent / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("program.py"), folder]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return a folder of model folders, and their results with the installed versions."""
    folder = tmp_path_factory.mktemp("models") / "models"
    kinds = {"luna": "ForCausalLM ForSequenceClassification", "mega": "ForCausalLM ForMaskedLM"}
    kinds |= {"luna_seq2seq": "ForSeq2SeqLM", "mega_seq2seq": "ForSeq2SeqLM", "megalodon": "ForCausalLM"}
    torch.manual_seed(0)
    for model_type, names in kinds.items():
        for name in names.split():
            make(model_type, f"AutoModel{name}").save_pretrained(folder / model_type / f"AutoModel{name}")
    return folder, run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("version", RUNS)
def test_transformers_that_is_older_than_the_package_requires(expected, tmp_path, version):
    """Logits, generated tokens and losses of `Trainer` are equal with each older version that the card promises."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    if subprocess.run([*pip, f"transformers=={version}"], capture_output=True).returncode:
        pytest.skip("pip reaches no package index")
    folder, results = expected
    assert run(folder, tmp_path) == results


def test_cards_name_the_versions(tmp_path):
    """All cards have the same sentence, and the slow test runs the oldest version that it names."""
    model = make("luna")
    model.save_pretrained(tmp_path)
    assert NEEDS in _cards.loading_section(type(model), tmp_path, "a/b", None) and NEEDS in converted().text
    assert RUNS[0].startswith(f"{compat.REQUIRED['transformers']}.")
