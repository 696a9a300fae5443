"""Register all classes with the `Auto*` classes of transformers."""

import warnings

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from luna_mega.modeling_luna import configuration_luna, modeling_luna, tokenization_luna
from luna_mega.modeling_mega import configuration_mega, modeling_mega
from luna_mega.modeling_megalodon import configuration_megalodon, modeling_megalodon

_MODULES = [configuration_luna, modeling_luna, configuration_mega, modeling_mega]
_MODULES += [configuration_megalodon, modeling_megalodon]
_CLASSES = {name: getattr(module, name) for module in _MODULES for name in module.__all__}
CONFIGS = {cls.model_type: cls for name, cls in _CLASSES.items() if name.endswith("Config")}

# Auto class -> (suffix of our class, table of class names in transformers). `register` does not update the table,
# which Trainer and pipelines use.
_AUTO_CLASSES = {
    "AutoModel": ("Model", "MODEL_MAPPING_NAMES"),
    "AutoModelForPreTraining": ("ForMaskedLM", "MODEL_FOR_PRETRAINING_MAPPING_NAMES"),
    "AutoModelForCausalLM": ("ForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "AutoModelForSeq2SeqLM": ("ForConditionalGeneration", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "AutoModelForMaskedLM": ("ForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    # Before the class for texts, which cards name.
    "AutoModelForAudioClassification": ("ForSequenceClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForSequenceClassification": (
        "ForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "AutoModelForImageClassification": ("ForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForMultipleChoice": ("ForMultipleChoice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
    "AutoModelForTokenClassification": ("ForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForQuestionAnswering": ("ForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
}


def model_classes(config: type) -> dict[str, type]:
    """Return name -> class of the models with this configuration class."""
    ours = {name: cls for name, cls in _CLASSES.items() if getattr(cls, "config_class", None) is config}
    return {name: cls for name, cls in ours.items() if not name.endswith("PreTrainedModel")}


def auto_classes(config: type) -> dict[str, type]:
    """Return the registered model of this configuration class for every ``Auto*`` class that has one."""
    stem, models, classes = config.__name__.removesuffix("Config"), model_classes(config), {}
    for auto_class, (suffix, _) in _AUTO_CLASSES.items():
        # LunaSeq2SeqModel, but LunaForConditionalGeneration
        model = models.get(stem + suffix) or models.get(stem.removesuffix("Seq2Seq") + suffix)
        if model is not None:
            classes[auto_class] = model
    return classes


def register_auto_classes() -> None:
    """Register all models of this package with the ``Auto*`` classes of transformers. Repeated calls have no effect.

    If transformers or another package has registered a model of the same type, a warning names it, and the class of
    this package replaces it.
    """
    for model_type, config in CONFIGS.items():
        _warn_of_others(model_type, config)
        transformers.AutoConfig.register(model_type, config, exist_ok=True)
        for auto_class, model in auto_classes(config).items():
            getattr(transformers, auto_class).register(config, model, exist_ok=True)
            getattr(modeling_auto, _AUTO_CLASSES[auto_class][1])[model_type] = model.__name__
    tokenizer = tokenization_luna.LunaTokenizer
    transformers.AutoTokenizer.register(configuration_luna.LunaConfig, tokenizer, exist_ok=True)


def _warn_of_others(model_type: str, config: type) -> None:
    """Warn if another class has registered a model type, because this registration replaces it."""
    if model_type not in CONFIG_MAPPING:
        return
    other = CONFIG_MAPPING[model_type]
    # The code of a folder, or this package after a reload, is the same model.
    if other is not config and other.__module__.split(".")[0] not in ("luna_mega", "transformers_modules"):
        warnings.warn(
            f"luna_mega replaces {other.__module__}.{other.__qualname__} as the class of model type {model_type!r}: "
            f"AutoConfig and AutoModel load its folders as {config.__name__}; to use the other model, load it with its "
            "own class, or do not import luna_mega",
            stacklevel=3,
        )
