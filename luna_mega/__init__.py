# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Luna and Mega for transformers. Importing the package registers their classes with the ``Auto*`` classes."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luna_mega._register import register_auto_classes

if TYPE_CHECKING:
    from luna_mega.modeling_luna.cache_luna import LunaCache as LunaCache, LunaSeq2SeqCache as LunaSeq2SeqCache
    from luna_mega.modeling_luna.configuration_luna import LunaConfig as LunaConfig
    from luna_mega.modeling_luna.generation_luna import (
        LunaForCausalLM as LunaForCausalLM,
        LunaForConditionalGeneration as LunaForConditionalGeneration,
        LunaSeq2SeqModel as LunaSeq2SeqModel,
    )
    from luna_mega.modeling_luna.heads_luna import (
        LunaForMaskedLM as LunaForMaskedLM,
        LunaForMultipleChoice as LunaForMultipleChoice,
        LunaForQuestionAnswering as LunaForQuestionAnswering,
        LunaForSequenceClassification as LunaForSequenceClassification,
        LunaForSequencePairClassification as LunaForSequencePairClassification,
        LunaForTokenClassification as LunaForTokenClassification,
    )
    from luna_mega.modeling_luna.modeling_luna import (
        LunaModel as LunaModel,
        LunaPreTrainedModel as LunaPreTrainedModel,
    )
    from luna_mega.modeling_luna.segments_luna import read_segments as read_segments
    from luna_mega.modeling_luna.tokenization_luna import LunaTokenizer as LunaTokenizer
    from luna_mega.modeling_mega.cache_mega import MegaCache as MegaCache, MegaSeq2SeqCache as MegaSeq2SeqCache
    from luna_mega.modeling_mega.configuration_mega import MegaConfig as MegaConfig
    from luna_mega.modeling_mega.generation_mega import (
        MegaForCausalLM as MegaForCausalLM,
        MegaForConditionalGeneration as MegaForConditionalGeneration,
        MegaSeq2SeqModel as MegaSeq2SeqModel,
    )
    from luna_mega.modeling_mega.heads_mega import (
        MegaForMultipleChoice as MegaForMultipleChoice,
        MegaForQuestionAnswering as MegaForQuestionAnswering,
        MegaForSequenceClassification as MegaForSequenceClassification,
        MegaForSequencePairClassification as MegaForSequencePairClassification,
        MegaForTokenClassification as MegaForTokenClassification,
    )
    from luna_mega.modeling_mega.modeling_mega import (
        MegaForMaskedLM as MegaForMaskedLM,
        MegaModel as MegaModel,
        MegaPreTrainedModel as MegaPreTrainedModel,
    )

__version__ = "0.1.0"

_EXPORTS = {
    "luna_mega.modeling_luna.cache_luna": ["LunaCache", "LunaSeq2SeqCache"],
    "luna_mega.modeling_luna.configuration_luna": ["LunaConfig"],
    "luna_mega.modeling_luna.generation_luna": ["LunaForCausalLM", "LunaForConditionalGeneration", "LunaSeq2SeqModel"],
    "luna_mega.modeling_luna.heads_luna": [
        "LunaForMaskedLM",
        "LunaForMultipleChoice",
        "LunaForQuestionAnswering",
        "LunaForSequenceClassification",
        "LunaForSequencePairClassification",
        "LunaForTokenClassification",
    ],
    "luna_mega.modeling_luna.modeling_luna": ["LunaModel", "LunaPreTrainedModel"],
    "luna_mega.modeling_luna.segments_luna": ["read_segments"],
    "luna_mega.modeling_luna.tokenization_luna": ["LunaTokenizer"],
    "luna_mega.modeling_mega.cache_mega": ["MegaCache", "MegaSeq2SeqCache"],
    "luna_mega.modeling_mega.configuration_mega": ["MegaConfig"],
    "luna_mega.modeling_mega.generation_mega": ["MegaForCausalLM", "MegaForConditionalGeneration", "MegaSeq2SeqModel"],
    "luna_mega.modeling_mega.heads_mega": [
        "MegaForMultipleChoice",
        "MegaForQuestionAnswering",
        "MegaForSequenceClassification",
        "MegaForSequencePairClassification",
        "MegaForTokenClassification",
    ],
    "luna_mega.modeling_mega.modeling_mega": [
        "MegaForMaskedLM",
        "MegaModel",
        "MegaPreTrainedModel",
    ],
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [*_MODULE_OF, "register_auto_classes"]

# In a checkout the sub-packages stand beside this folder, not in it.
_root = Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").is_file():
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_auto_classes()
