"""Page of `luna-mega demo` through the client of gradio, and the Space."""

import os
import subprocess
import sys

import pytest
from huggingface_hub import SpaceCard

from luna_mega import cli

pytest.importorskip("gradio", reason="gradio is not installed")

import gradio
import httpx
from gradio_client import Client, handle_file

from luna_mega.demo import page as pages

TEXT = "An eel, a cat and 1 mole"


@pytest.fixture
def client(folder):
    """Open the page of a model of this class."""
    opened = []

    def open_page(name):
        page = pages.build_page(folder(name))
        opened.append(page)
        _, url, _ = page.launch(
            prevent_thread_lock=True, quiet=True, server_name="127.0.0.1", app_kwargs=pages.WITHOUT_UPLOADS
        )
        return Client(url, verbose=False)

    yield open_page
    for page in opened:
        page.close(verbose=False)


def test_luna(client):
    page = client("LunaForMaskedLM")
    scores = page.predict("a <mask> b", api_name="/score")
    assert scores["label"] and len(scores["confidences"]) > 1
    with pytest.raises(Exception, match="must contain <mask> exactly once"):
        page.predict("a b", api_name="/score")
    pack, unpack, *pictures, token = page.predict(TEXT, 2, 3, api_name="/show_rows")
    for marks in (pack, unpack, page.predict(TEXT, 1, 4, api_name="/show_token")):
        assert "".join(mark["token"] for mark in marks) == TEXT.replace(" ", "␣")
        assert max(mark["class_or_confidence"] for mark in marks) == 1
    assert all(handle_file(picture)["path"].endswith(".png") for picture in pictures) and token["maximum"] == len(TEXT)


def test_a_page_takes_no_files_and_no_long_texts(client):
    page = client("LunaForSequenceClassification")
    answer = httpx.post(f"{page.src.rstrip('/')}/gradio_api/upload", files={"files": b"anything"})
    assert answer.status_code == 403 and answer.text == "this page does not accept files"
    with pytest.raises(Exception, match="3,000,000 characters, but the limit is 50,000"):
        page.predict("a" * 3_000_000, api_name="/score")
    assert page.predict(TEXT, api_name="/score")["label"]


@pytest.mark.parametrize("family", ["Mega", "Megalodon"])
def test_mega(client, family):
    page = client(f"{family}ForCausalLM")
    job = page.submit("ab", 6, 1.0, api_name="/write")
    assert job.result() == job.outputs()[-1]
    marks = page.predict(TEXT, 2, 10, api_name="/show_token")
    assert [index for index, mark in enumerate(marks) if mark["class_or_confidence"]] == [8, 9]
    picture, token = page.predict(TEXT, 1, api_name="/show_all")
    assert picture.endswith(".png") and token["maximum"] == len(TEXT)
    chart, picture = page.predict(2, 16, api_name="/show_kernels")
    assert len(chart["plot"]["data"] if "plot" in chart else chart["data"]) == 128 and picture.endswith(".png")


def test_space_contains_the_page(folder, tmp_path, monkeypatch, capsys):
    made = folder("LunaForSequenceClassification")
    (made / "checkpoint-5").mkdir(exist_ok=True)
    assert cli.main(["demo", str(made), "--space", str(tmp_path / "space")]) == 0
    assert "app.py" in capsys.readouterr().out
    space = tmp_path / "space"
    card = SpaceCard.load(space / "README.md").data
    assert (card.sdk, card.sdk_version, card.app_file) == ("gradio", gradio.__version__, "app.py")
    assert not (space / "model" / "checkpoint-5").exists()
    code = """
import gradio, luna_mega, runpy
gradio.Blocks.launch = lambda page, **options: print(page.title, luna_mega.__file__)
runpy.run_path("app.py", run_name="__main__")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=space, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["model", str(space / "luna_mega" / "__init__.py")], done.stderr
    requirements = (space / "requirements.txt").read_text().split()
    assert [line.partition("==")[0] for line in requirements] == ["torch", "transformers"]
    assert cli.main(["demo", str(made), "--space", str(space)]) == 1
    assert "not empty" in capsys.readouterr().err


def test_errors_are_one_line(folder, tmp_path, monkeypatch, capsys):
    def error(*argv):
        assert cli.main(["demo", *map(str, argv)]) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("luna-mega demo: error: ")]
        return line

    assert "no such folder" in error(tmp_path / "nowhere")

    def launch(self, **options):
        assert options == {"server_name": "0.0.0.0", "server_port": 7, "app_kwargs": pages.WITHOUT_UPLOADS}
        raise OSError("Cannot find empty port in range: 7-7")

    monkeypatch.setattr(gradio.Blocks, "launch", launch)
    made = folder("LunaForMaskedLM")
    assert "use another --port" in error(made, "--host", "0.0.0.0", "--port", 7)
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "`pip install '.[demo]'`" in error(made)
