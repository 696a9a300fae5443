"""The page of `examples/space/app.py`, with the client of gradio and as a Space."""

import os
import subprocess
import sys

import pytest
import torch

from luna_mega.hub.bundle import bundle
from tests.modeling import luna, mega, mega_decoders, megalodon_decoders

pytest.importorskip("gradio", reason="gradio is not installed")

from gradio_client import Client  # noqa: E402

TEXT = "w1 w2 w3 w4 w5 w6 w7 w8"


@pytest.fixture
def save(tokenizer, tmp_path):
    def save(model):
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@pytest.fixture
def app(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(repo_root / "examples" / "space")
    import app

    yield app
    del sys.modules["app"]


CHUNKS = {"use_chunking": True, "chunk_size": 4, "vocab_size": 40, "dtype": torch.float32}
PAGES = {
    "luna": (lambda: luna.make("ForMaskedLM"), "w1 <mask> w3"),
    "mega": (lambda: mega_decoders.make(**CHUNKS), "w1 w2"),
    "megalodon": (
        lambda: megalodon_decoders.make("ForSequenceClassification", torch.float32, vocab_size=40, chunk_size=4),
        "w1 w2",
    ),
}


@pytest.mark.parametrize("family", PAGES)
def test_page(family, app, save):
    make, text = PAGES[family]
    folder = save(make())
    page, run = app.make_page(folder), app.load(folder)
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, show_error=True, server_name="127.0.0.1")
    try:
        client = Client(url, verbose=False)
        answer = client.predict(text, api_name="/task")
        if family == "mega":
            ids = run.tokenizer(text, return_tensors="pt").input_ids
            new = run.model.generate(ids, max_new_tokens=50, do_sample=False)[0, ids.shape[1] :]
            assert answer == text + run.tokenizer.decode(new, skip_special_tokens=True)
        else:
            logits = run.model(**run.tokenizer(text, return_tensors="pt")).logits[0]
            best = logits[1 if family == "luna" else ...].softmax(-1).max().item()
            assert answer["confidences"][0]["confidence"] == pytest.approx(best)
        assert client.predict(TEXT, 2, api_name="/attention")["plot"].startswith("data:image/")
        with pytest.raises(Exception, match="the batch is empty"):
            client.predict("", 1, api_name="/attention")
    finally:
        page.close(verbose=False)
    tokens, weights = app.attention_weights(run, TEXT, 1)
    assert tokens == TEXT.split() and torch.allclose(weights.sum(-1), torch.ones(8))
    if family == "luna":
        assert weights.shape == (8, 6)
    else:
        position = torch.arange(8)
        inside = (position[:, None] // 4 == position // 4) & (position[:, None] >= position)
        assert ((weights > 0) == inside).all()


def test_space_loads_a_bundle(repo_root, save, tmp_path):
    """The app serves a bundle without the package and without arguments."""
    bundle(save(mega.make("ForMaskedLM")), tmp_path / "bundle")
    code = """
import runpy, sys
sys.modules["luna_mega"] = None
import gradio
gradio.TabbedInterface.launch = lambda page, **options: print("title:", page.title)
runpy.run_path("app.py", run_name="__main__")
"""
    environment = os.environ | {"MODEL": str(tmp_path / "bundle"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command, space = [sys.executable, "-c", code], repo_root / "examples" / "space"
    done = subprocess.run(command, cwd=space, env=environment, capture_output=True, encoding="utf-8")
    assert "title: MegaForMaskedLM" in done.stdout, done.stderr


def test_other_classes_raise(app, save):
    with pytest.raises(SystemExit, match="contains a LunaForTokenClassification; use a model of ForMaskedLM, "):
        app.main([save(luna.make("ForTokenClassification"))])
