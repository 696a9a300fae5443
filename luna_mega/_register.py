# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Our classes in the ``Auto*`` classes of transformers."""

import transformers
from transformers.models.auto import modeling_auto

from luna_mega.modeling_luna import configuration_luna, generation_luna, heads_luna, modeling_luna, tokenization_luna
from luna_mega.modeling_mega import configuration_mega, generation_mega, heads_mega, modeling_mega

_MODULES = [configuration_luna, generation_luna, heads_luna, modeling_luna]
_MODULES += [configuration_mega, generation_mega, heads_mega, modeling_mega]
_CLASSES = {name: getattr(module, name) for module in _MODULES for name in module.__all__}
_FAMILIES = ["Luna", "Mega"]

# Auto class -> (suffix of our class, table of class names in transformers). Trainer and pipelines look a class up
# by its name in that table; the Auto class itself knows only class objects.
_AUTO_CLASSES = {
    "AutoModel": ("Model", "MODEL_MAPPING_NAMES"),
    "AutoModelForPreTraining": ("ForMaskedLM", "MODEL_FOR_PRETRAINING_MAPPING_NAMES"),
    "AutoModelForCausalLM": ("ForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "AutoModelForSeq2SeqLM": ("ForConditionalGeneration", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "AutoModelForMaskedLM": ("ForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "AutoModelForSequenceClassification": (
        "ForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "AutoModelForImageClassification": ("ForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForMultipleChoice": ("ForMultipleChoice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
    "AutoModelForTokenClassification": ("ForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForQuestionAnswering": ("ForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
}


def auto_classes(family: str) -> dict[str, type]:
    """Return the class of a family for every ``Auto*`` class that has one."""
    names = {auto_class: family + suffix for auto_class, (suffix, _) in _AUTO_CLASSES.items()}
    return {auto_class: _CLASSES[name] for auto_class, name in names.items() if name in _CLASSES}


def register_auto_classes() -> None:
    """Make the ``Auto*`` classes of transformers know every model of this package. Calling it again changes nothing."""
    for family in _FAMILIES:
        config = _CLASSES[f"{family}Config"]
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto_class, model in auto_classes(family).items():
            getattr(transformers, auto_class).register(config, model, exist_ok=True)
            getattr(modeling_auto, _AUTO_CLASSES[auto_class][1])[config.model_type] = model.__name__
    tokenizer = tokenization_luna.LunaTokenizer
    transformers.AutoTokenizer.register(configuration_luna.LunaConfig, tokenizer, exist_ok=True)
