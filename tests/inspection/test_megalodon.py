"""`luna-mega info` and `luna-mega verify` for Megalodon."""

from luna_mega import MegalodonConfig, MegalodonForCausalLM
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.inspection.test_decoders import MEGALODON

ALL = {"swiglu": True, "rescale_nffn": True, "scale_embedding": True, "tie_word_embeddings": True}


def make(model_class=MegalodonForCausalLM, **fields):
    return model_class(MegalodonConfig(**MEGALODON | fields))


def test_info_and_verify_of_a_folder(tmp_path, capsys):
    for name in "ab":
        make(**ALL).save_pretrained(tmp_path / name)
    info = describe(tmp_path / "a")
    model = MegalodonForCausalLM.from_pretrained(tmp_path / "a")
    assert info.parameters["total"] == model.num_parameters() and info.heads == ["causal LM"] and info.length == 32
    assert info.parameters["embeddings"] == 40 * 32 and info.parameters["head"] == 0
    assert info.config["chunk_size"] == 32 and "max_position_embeddings" not in info.config
    assert main(["info", str(tmp_path / "a"), "--length", "500"]) == 0
    assert "for one sequence of length 500, 0 B for one more token" in capsys.readouterr().out
    assert compare(tmp_path / "a", tmp_path / "a", length=70, tolerance=0.0).largest == 0
    other = compare(tmp_path / "a", tmp_path / "b", length=70)
    assert not other.within and [row["layer"] for row in other.layers] == [0, 1, 2]
