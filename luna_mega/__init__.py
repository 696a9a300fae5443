"""Luna, Mega and Megalodon for transformers. Importing the package registers them with the `Auto*` classes."""

from pathlib import Path

__version__ = "0.6.0"

# In a checkout, links in this folder lead to the sub-packages beside it. Some systems and archives have no links.
if not (_folder := Path(__file__).resolve().parent).joinpath("kernels").is_dir():
    __path__.append(str(_folder.parent))

from luna_mega import compat  # noqa: F401  # first, because it checks the versions of what is imported next
from luna_mega._register import register_auto_classes
from luna_mega.cards import add_to_cards
from luna_mega.modeling_luna.configuration_luna import *
from luna_mega.modeling_luna.modeling_luna import *
from luna_mega.modeling_luna.segments_luna import *
from luna_mega.modeling_luna.tokenization_luna import LunaTokenizer
from luna_mega.modeling_mega.configuration_mega import *
from luna_mega.modeling_mega.modeling_mega import *
from luna_mega.modeling_megalodon.configuration_megalodon import *
from luna_mega.modeling_megalodon.modeling_megalodon import *
from luna_mega.saved_code import save_code

__all__ = [
    "LunaCache",
    "LunaConfig",
    "LunaForCausalLM",
    "LunaForConditionalGeneration",
    "LunaForMaskedLM",
    "LunaForMultipleChoice",
    "LunaForQuestionAnswering",
    "LunaForSequenceClassification",
    "LunaForSequencePairClassification",
    "LunaForTokenClassification",
    "LunaModel",
    "LunaPreTrainedModel",
    "LunaSeq2SeqCache",
    "LunaSeq2SeqConfig",
    "LunaSeq2SeqModel",
    "LunaTokenizer",
    "MegaCache",
    "MegaConfig",
    "MegaForCausalLM",
    "MegaForConditionalGeneration",
    "MegaForImageClassification",
    "MegaForMaskedLM",
    "MegaForMultipleChoice",
    "MegaForQuestionAnswering",
    "MegaForSequenceClassification",
    "MegaForSequencePairClassification",
    "MegaForTokenClassification",
    "MegaModel",
    "MegaPreTrainedModel",
    "MegaSeq2SeqCache",
    "MegaSeq2SeqConfig",
    "MegaSeq2SeqModel",
    "MegalodonCache",
    "MegalodonConfig",
    "MegalodonForCausalLM",
    "MegalodonForSequenceClassification",
    "MegalodonModel",
    "MegalodonPreTrainedModel",
    "read_segments",
    "register_auto_classes",
    "save_code",
]

register_auto_classes()
add_to_cards()
