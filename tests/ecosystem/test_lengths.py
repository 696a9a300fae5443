"""The classes of sentence-transformers truncate to the length that `luna-mega distill` prints."""

import pytest
import torch

from tests.distillation.test_lengths import CASES, TEXT, convert

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

CLASSES = {  # class -> kinds of folders
    "SentenceTransformer": ("encoder", "sentence-transformers", "cross-encoder", "sparse encoder", "token classifier"),
    "CrossEncoder": ("cross-encoder",),
    "SparseEncoder": ("sparse encoder",),
}


@pytest.mark.parametrize(
    ("name", "kind", "length"),
    [(name, kind, length) for name, kinds in CLASSES.items() for kind, length in CASES if kind in kinds],
)
def test_the_printed_length_is_read(name, kind, length, tmp_path, capsys):
    folder, printed = convert(kind, length, tmp_path, capsys)
    model = getattr(sentence_transformers, name)(str(folder), device="cpu")
    sizes = []
    layer = model[0].model.base_model.encoder.layers[0]
    layer.attention.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    if name == "CrossEncoder":
        model.predict([(TEXT, "w1 w2")], show_progress_bar=False)
    else:
        model.encode([TEXT], show_progress_bar=False)
        model.encode_document([TEXT], show_progress_bar=False)
    assert model.max_seq_length == printed and set(sizes) == {printed}
    model.save_pretrained(str(tmp_path / "again"))
    again = getattr(sentence_transformers, name)(str(tmp_path / "again"), device="cpu")
    assert again.max_seq_length == printed and again[0].model.config.max_position_embeddings == printed


def test_a_text_beyond_the_table(tmp_path, capsys):
    """The last words of a long text affect its vector, so it is not truncated to the teacher's length."""
    folder, printed = convert("encoder", 48, tmp_path, capsys)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    words = TEXT.split()[:46]
    first, second = (torch.from_numpy(model.encode(" ".join([*words[:-1], last]))) for last in ("w1", "a"))
    assert (first - second).abs().max() > 1e-4
