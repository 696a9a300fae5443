"""Published models: parameter counts, and fields that override a preset; `surface.json` has the fields of presets."""

import pytest
import torch

import luna_mega

IMAGES = ("MegaForImageClassification", "image_base_patch16_224", ())
# Class, preset, its vocabulary if it has one, fields, number of parameters (of the original: in millions).
PUBLISHED = [
    ("MegaForSequenceClassification", "lra_listops", (21,), {}, "0.602"),
    ("MegaForSequenceClassification", "lra_text", (261,), {}, "0.991"),
    ("MegaForSequencePairClassification", "lra_retrieval", (261,), {}, "1.485"),
    ("MegaForSequenceClassification", "lra_image", (), {}, "2.839"),
    ("MegaForSequenceClassification", "lra_pathfinder", (), {}, "1.387"),
    ("MegaForSequenceClassification", "lra_pathfinder128", (), {}, "0.382"),
    ("MegaForSequenceClassification", "sc_base", (), {}, "0.343"),
    ("MegaForSequenceClassification", "sc_big", (), {}, "0.476"),
    ("MegaForCausalLM", "lm_wikitext103", (), {}, "252.24"),
    ("MegaForCausalLM", "lm_enwik8", (), {}, "39.14"),
    ("MegaForConditionalGeneration", "wmt_en_de", (32768,), {}, "63.14"),
    # The vocabulary with which the model has the size in Table 10.
    ("MegaForConditionalGeneration", "wmt_en_de", (40320,), {}, "67.00"),
    ("MegaForConditionalGeneration", "wmt_en_de", (33000,), {}, "63.26"),
    # The widths of Table 9.
    ("MegaForCausalLM", "lm_wikitext103", (), {"intermediate_size": 1536, "nffn_hidden_size": 1536}, "210.27"),
    ("MegaForConditionalGeneration", "wmt_en_de_big", (33000,), {}, "217.70"),
    (*IMAGES, {}, 90_734_140),
    (*IMAGES, {"use_absolute_position_embeddings": False}, 90_583_612),
    (*IMAGES, {"image_size": 384}, 91_035_100),
    ("MegaForImageClassification", "image_tiny_patch16_224", (), {}, 6_209_596),
    ("MegalodonForCausalLM", "mega_200m", (), {}, 220_627_968),
    ("MegalodonForCausalLM", "mega_1_3b", (), {}, 1_342_832_640),
    ("MegalodonForCausalLM", "mega_1_3b_pg19", (), {}, 1_327_628_288),
    ("MegalodonForCausalLM", "mega_7_1b", (), {}, 7_117_381_632),
    ("MegalodonForCausalLM", "mega_7_3b", (), {}, 7_385_817_088),
    ("MegalodonForCausalLM", "megalodon_7b", (), {}, 7_385_817_088),
    ("LunaForMaskedLM", "base_512", (), {}, 131_902_041),
    ("LunaForMaskedLM", "base_512", (), {"tied": False}, 146_076_249),
    ("LunaForMaskedLM", "base_2048", (), {}, 133_179_993),
    ("LunaForMaskedLM", "large_512", (), {}, 380_783_705),
    ("LunaForMaskedLM", "large_2048", (), {}, 380_914_777),
    ("LunaForConditionalGeneration", "wmt", (40480, 16), {}, "69.61"),
    ("LunaForConditionalGeneration", "wmt", (40480, 32), {}, "69.62"),
    ("LunaForConditionalGeneration", "wmt", (40480, 16), {"tied": False}, "77.49"),
    ("LunaForSequenceClassification", "base_512", (), {}, 131_259_648 + 769 * 768 + 769 * 2),
]


@pytest.mark.parametrize("name, preset, vocabulary, fields, count", PUBLISHED)
def test_parameters(name, preset, vocabulary, fields, count):
    config_class = getattr(luna_mega, f"{name.partition('For')[0]}Config")
    with torch.device("meta"):
        model = getattr(luna_mega, name)(getattr(config_class, preset)(*vocabulary, **fields))
    found = model.num_parameters()
    assert count == (found if isinstance(count, int) else f"{found / 1e6:.{len(count.split('.')[1])}f}")
    if preset == "wmt_en_de":
        assert round((found - model.lm_head.weight.numel()) / 1e6, 2) == 46.36
    assert name != "MegalodonForCausalLM" or getattr(type(model.config), preset)(vocab_size=50).vocab_size == 50
