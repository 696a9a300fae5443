"""Sizes of the authors' models in the pages and docstrings are those of the presets."""

import pytest
import torch

import luna_mega
from luna_mega import LunaConfig, MegaConfig
from tests.docs.blocks import ROOT

# Preset, class of the model, and the texts that state its size.
MODELS = [
    (LunaConfig.base_512, "LunaForMaskedLM", {"docs/pretrained_models.md": "Luna base, tied keys and values | {} M"}),
    (
        lambda: LunaConfig.base_512(tied=False),
        "LunaForMaskedLM",
        {
            "docs/pretrained_models.md": ["Luna base, untied | {} M", "{} M untied"],
            "modeling_luna/presets_luna.py": "`luna_base_untied_512` ({} M)",
        },
    ),
    (
        MegaConfig.lm_wikitext103,
        "MegaForCausalLM",
        {"docs/pretrained_models.md": "Mega, WikiText-103 | {} M", "README.md": "Mega WikiText-103 ({} M)"},
    ),
    (
        MegaConfig.lm_enwik8,
        "MegaForCausalLM",
        {"docs/pretrained_models.md": "Mega, enwik8 | {} M", "README.md": "enwik8 ({} M)"},
    ),
    (
        MegaConfig.image_base_patch16_224,
        "MegaForImageClassification",
        {"docs/pretrained_models.md": ["Mega, ImageNet-1k | {} M", "ImageNet {} M"]},
    ),
]


@pytest.mark.parametrize(("preset", "name", "texts"), MODELS)
def test_size(preset, name, texts):
    with torch.device("meta"):
        size = round(getattr(luna_mega, name)(preset()).num_parameters() / 1e6)
    for file, stated in texts.items():
        page = (ROOT / file).read_text(encoding="utf-8")
        for text in [stated] if isinstance(stated, str) else stated:
            assert text.format(size) in page, (file, size)
