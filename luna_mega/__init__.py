# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Luna, Mega and Megalodon for transformers. Importing the package registers them with the ``Auto*`` classes."""

from pathlib import Path

__version__ = "0.2.0"

# In a checkout the sub-packages stand beside this folder, not in it.
if (_root := Path(__file__).resolve().parent.parent).joinpath("setup.cfg").is_file():
    __path__.append(str(_root))

from luna_mega import compat as compat  # first, because it checks the versions of what is imported next
from luna_mega._register import register_auto_classes as register_auto_classes
from luna_mega.modeling_common.context_parallel import shard_sequence as shard_sequence
from luna_mega.modeling_luna.cache_luna import LunaCache as LunaCache, LunaSeq2SeqCache as LunaSeq2SeqCache
from luna_mega.modeling_luna.configuration_luna import (
    LunaConfig as LunaConfig,
    LunaSeq2SeqConfig as LunaSeq2SeqConfig,
)
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
from luna_mega.modeling_luna.modeling_luna import LunaModel as LunaModel, LunaPreTrainedModel as LunaPreTrainedModel
from luna_mega.modeling_luna.segments_luna import read_segments as read_segments
from luna_mega.modeling_luna.tokenization_luna import LunaTokenizer as LunaTokenizer
from luna_mega.modeling_mega.cache_mega import MegaCache as MegaCache, MegaSeq2SeqCache as MegaSeq2SeqCache
from luna_mega.modeling_mega.configuration_mega import (
    MegaConfig as MegaConfig,
    MegaSeq2SeqConfig as MegaSeq2SeqConfig,
)
from luna_mega.modeling_mega.generation_mega import (
    MegaForCausalLM as MegaForCausalLM,
    MegaForConditionalGeneration as MegaForConditionalGeneration,
    MegaSeq2SeqModel as MegaSeq2SeqModel,
)
from luna_mega.modeling_mega.heads_mega import (
    MegaForImageClassification as MegaForImageClassification,
    MegaForMaskedLM as MegaForMaskedLM,
    MegaForMultipleChoice as MegaForMultipleChoice,
    MegaForQuestionAnswering as MegaForQuestionAnswering,
    MegaForSequenceClassification as MegaForSequenceClassification,
    MegaForSequencePairClassification as MegaForSequencePairClassification,
    MegaForTokenClassification as MegaForTokenClassification,
)
from luna_mega.modeling_mega.modeling_mega import MegaModel as MegaModel, MegaPreTrainedModel as MegaPreTrainedModel
from luna_mega.modeling_megalodon.cache_megalodon import MegalodonCache as MegalodonCache
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig as MegalodonConfig
from luna_mega.modeling_megalodon.generation_megalodon import MegalodonForCausalLM as MegalodonForCausalLM
from luna_mega.modeling_megalodon.heads_megalodon import (
    MegalodonForSequenceClassification as MegalodonForSequenceClassification,
)
from luna_mega.modeling_megalodon.modeling_megalodon import (
    MegalodonModel as MegalodonModel,
    MegalodonPreTrainedModel as MegalodonPreTrainedModel,
)

# The imports above are the list of public names.
__all__ = [name for name, value in list(globals().items()) if getattr(value, "__module__", "").startswith("luna_mega.")]

register_auto_classes()
