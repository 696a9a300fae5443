"""Checkpoints of the original code: conversions have all tensors."""

import json

import pytest
from transformers import AutoModelForSequenceClassification

from luna_mega.convert import convert_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.convert.contract import check_arrived
from tests.convert.folders import load
from tests.errors import command_error
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
    meta, source = (
        json.loads((fixture / "meta.json").read_text(encoding="utf-8")),
        read_checkpoint(fixture / "checkpoint.pt"),
    )
    for head in (None, *(meta.get("heads") or ())):
        place = tmp_path / str(head)
        convert_checkpoint(fixture / "checkpoint.pt", place / "model", head=head)
        report = json.loads((place / "model" / "conversion_report.json").read_text(encoding="utf-8"))
        check_arrived(source.tensors, load(place / "model").state_dict(), report)
        dictionaries = fixture.glob("dict.??.txt" if "s2s" in name or "_mt_" in name else "dict.txt")
        copies = {file.read_bytes() for file in (place / "model").glob("dict*.txt")}
        assert {file.read_bytes() for file in dictionaries} <= copies
        if head is not None and report["model_class"] == "LunaForSequenceClassification":
            config = AutoModelForSequenceClassification.from_pretrained(place / "model").config
            sizes = meta["heads"][head]
            assert config.num_labels == sizes["num_classes"]
            assert config.classifier_hidden_size == (sizes["inner_dim"] or config.hidden_size)
        elif head is None and name.startswith(("luna/bert", "luna/head", "luna/lra")):
            assert report["model_class"] == expected_class(meta) and report["dtype_out"] == "float32"
            assert report["source"]["revision"] == meta["revision"]
            assert report["decisions"]["layer_norm"] == ("plus-one" if meta["revision"] == "head" else "standard")


@pytest.mark.parametrize("name", ["01_ema_causal", "03_mega_bidir_relu2_simple_rmsnorm_pre", "15_flash_ema_bidir"])
def test_other_models_raise(parity_folder, tmp_path, capsys, name):
    file = parity_folder("mega", name) / "checkpoint.pt"
    message = command_error(capsys, "convert", file, "--output", tmp_path / "out")
    assert "a Mega checkpoint, but of none of the kinds that are known" in message
    assert not list(tmp_path.iterdir())
