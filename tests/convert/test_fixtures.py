"""Checkpoints of the original code: conversions have all tensors."""

import json
from dataclasses import asdict

import pytest

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.convert.contract import check_arrived
from tests.convert.folders import load
from tests.marks import slow_but

FAST = ["luna/bert_heads", "luna/lra21_retrieval", "mega/08_lm_adaptive_tied_factor2_base"]
FAST += ["mega/12_lra_image_laplace_batchnorm", "mega/15_flash_mt_softmax_trunc0"]
ALL = FAST + [
    *("luna/bert_ranking_fp16", "luna/head_bert_tied", "luna/lra21_listops_tied_layers", "luna/s2s_tied"),
    *("luna/lra23_meanpool_tied_layers", "mega/07_lm_postnorm_laplace_simple_trunc"),
    "mega/10_mt_relu2_rotary_prenorm_chunk_unshared",
    *(f"luna/{name}" for name in ("bert_fixlen", "bert_tied", "bert_untied", "bert_untied_lm_weight")),
    *(f"luna/lra21_{name}" for name in ("cls", "meanpool", "use_p")),
    *(f"luna/lra23_{name}" for name in ("cls", "image", "learnedpos", "retrieval", "use_p")),
    *("luna/s2s_lnemb_learned_fixlen", "luna/s2s_untied_prenorm"),
    *(f"mega/07_lm_{x}" for x in ("enwik8_tied_rotary_chunk", "relu2_simple_chunk_untied_projin")),
    *(f"mega/08_lm_{name}" for name in ("adaptive_tied_noproj", "adaptive_untied", "wt103_adaptive_tied")),
    *("mega/09_mt_softmax_shared", "mega/10_mt_laplace_shared", "mega/14_sc_raw_base"),
    *("mega/11_lra_text_cls_prenorm_chunk", "mega/13_lra_retrieval_cls_chunk"),
    "mega/16_image_batchnorm_linear_nopos_rep",
]


def expected_class(meta):
    if meta["kind"] == "luna_lra":
        return "LunaForSequencePairClassification" if meta["pair"] else "LunaForSequenceClassification"
    return "LunaForMultipleChoice" if meta["args"]["task"] == "sentence_ranking" else "LunaForMaskedLM"


@pytest.mark.parametrize("name", slow_but(FAST, ALL))
def test_a_file_of_the_original(parity_folder, tmp_path, name):
    fixture = parity_folder(*name.split("/"))
    source, meta = fixture / "checkpoint.pt", json.loads((fixture / "meta.json").read_text(encoding="utf-8"))
    for head in (None, *(meta.get("heads") or ())):
        folder = tmp_path / str(head)
        report = convert_checkpoint(source, folder, head=head)
        model = load(folder)
        check_arrived(read_checkpoint(source).tensors, model.state_dict(), asdict(report))
        dictionaries = fixture.glob("dict.??.txt" if "s2s" in name or "_mt_" in name else "dict.txt")
        copies = {file.read_bytes() for file in folder.glob("dict*.txt")}
        assert {file.read_bytes() for file in dictionaries} <= copies
        if head is not None and report.model_class == "LunaForSequenceClassification":
            sizes = meta["heads"][head]
            assert model.config.num_labels == sizes["num_classes"]
            assert model.config.classifier_hidden_size == (sizes["inner_dim"] or model.config.hidden_size)
        elif head is None and name.startswith(("luna/bert", "luna/head", "luna/lra")):
            assert report.model_class == expected_class(meta) and report.dtype_out == "float32"
            assert report.source["revision"] == meta["revision"]
            assert report.decisions["layer_norm"] == ("plus-one" if meta["revision"] == "head" else "standard")


@pytest.mark.parametrize("name", ["01_ema_causal", "03_mega_bidir_relu2_simple_rmsnorm_pre", "15_flash_ema_bidir"])
def test_other_models_raise(parity_folder, tmp_path, name):
    with pytest.raises(ConversionError, match="a Mega checkpoint, but of none of the kinds that are known"):
        convert_checkpoint(parity_folder("mega", name) / "checkpoint.pt", tmp_path / "out")
    assert not list(tmp_path.iterdir())
