# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
import transformers
from transformers.models.auto import modeling_auto

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
    "AutoModelForMultipleChoice": ("ForMultipleChoice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
    "AutoModelForTokenClassification": ("ForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForQuestionAnswering": ("ForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
}


def auto_classes(family: str) -> dict[str, type]:
    """The class of a family for every ``Auto*`` class that has one."""
    import luna_mega

    classes = {name: getattr(luna_mega, family + suffix, None) for name, (suffix, _) in _AUTO_CLASSES.items()}
    return {name: model for name, model in classes.items() if model is not None}


def register_auto_classes() -> None:
    """Make the ``Auto*`` classes of transformers know every model of this package. Calling it again changes nothing."""
    import luna_mega

    for family in _FAMILIES:
        config = getattr(luna_mega, f"{family}Config")
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto_class, model in auto_classes(family).items():
            getattr(transformers, auto_class).register(config, model, exist_ok=True)
            getattr(modeling_auto, _AUTO_CLASSES[auto_class][1])[config.model_type] = model.__name__
    transformers.AutoTokenizer.register(luna_mega.LunaConfig, luna_mega.LunaTokenizer, exist_ok=True)
