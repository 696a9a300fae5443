"""SentenceTransformer loads the folders of examples/run_distill_embeddings.py."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.examples.conftest import call, offline, script  # noqa: F401  (fixtures)
from tests.examples.test_run_distill_embeddings import (  # noqa: F401  (fixtures)
    command,
    corpus,
    save_encoder,
    save_sentence_encoder,
)

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


@pytest.mark.parametrize("save", [save_encoder, save_sentence_encoder])
def test_folder_is_loaded(save, call, corpus, tmp_path):  # noqa: F811
    output = tmp_path / "out"
    call("run_distill_embeddings", *command(save(tmp_path / "teacher"), corpus, output), "--max_steps", 1)
    model = sentence_transformers.SentenceTransformer(str(output), device="cpu")
    assert model.max_seq_length == 64
    text = "one two three four five six"
    inputs = AutoTokenizer.from_pretrained(output)(text, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(output)(**inputs).last_hidden_state[0]
    expected = states[0] / states[0].norm() if save is save_sentence_encoder else states.mean(dim=0)
    torch.testing.assert_close(torch.from_numpy(model.encode(text)), expected)
