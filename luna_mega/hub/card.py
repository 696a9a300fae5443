"""Model cards of converted checkpoints, with metadata for the Hub, and licenses. `model_card.md` is the template."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig

from luna_mega._cards import TAG, WITHOUT_PACKAGE, auto_class_of, loading_without_package
from luna_mega._register import model_classes
from luna_mega.errors import ConversionError, shown
from luna_mega.escaping import code, code_block, markdown
from luna_mega.modeling_common.base import INPUT_OF_FIELD

_TEMPLATE = str(Path(__file__).with_name("model_card.md"))
_TASKS = {
    "Model": "feature-extraction",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "translation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}
# https://huggingface.co/docs/hub/repositories-licenses
_LICENSES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
    eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
    intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
    mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 pddl postgresql unknown unlicense
    wtfpl zlib
    """.split()
)
# Fields of the configuration in the table of the architecture, by model family.
FIELDS = {
    "luna": (
        "num_hidden_layers", "share_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_pack_attention_heads", "projection_length", "dynamic_projection_length", "contextual_projection",
        "tie_key_value", "hidden_act", "pre_norm", "input_type", "vocab_size", "max_position_embeddings",
        "position_embedding_type", "pooling", "pool_padding",
    ),
    "mega": (
        "num_hidden_layers", "hidden_size", "intermediate_size", "shared_representation_size",
        "ema_projection_size", "nffn_hidden_size", "bidirectional", "use_chunking", "chunk_size", "truncation",
        "attention_activation", "relative_positional_bias", "normalization_type", "normalize_before_mega",
        "input_type", "image_size", "patch_size", "vocab_size", "adaptive_softmax_cutoffs", "max_positions",
        "pooling",
    ),
    "megalodon": (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "shared_representation_size", "value_size",
        "intermediate_size", "ema_projection_size", "norm_num_groups", "chunk_size", "rope_theta", "swiglu",
        "vocab_size", "output_size",
    ),
}  # fmt: skip


def conversion_card(
    name: str,
    model_class: str,
    config: PreTrainedConfig,
    source: Mapping[str, Any],
    report: str,
    *,
    parameters: int,
    tokenizer: bool,
    license: str | None = None,
) -> ModelCard:
    """Return the card of a converted checkpoint.

    `source` contains `file`, `sha256` and `arch` of the checkpoint, and the `software` that saved it. `report` is the
    text of the conversion report, whose line about the output folder is omitted.

    Raises:
        ConversionError: If the license does not have the form that `license_metadata` accepts.
    """
    software = source.get("software", "fairseq")
    suffix = _suffix(model_class, config)
    cls = model_classes(type(config))[model_class]
    loader = auto_class_of(cls)
    imports = [loader] if loader else []
    imports += ["AutoImageProcessor"] * (suffix == "ForImageClassification") + ["AutoTokenizer"] * tokenizer
    data = ModelCardData(
        library_name="transformers",
        tags=[config.model_type, TAG],
        pipeline_tag=task_of(model_class, config),
        **license_metadata(license),
    )
    return ModelCard.from_template(
        data,
        template_path=_TEMPLATE,
        name=markdown(name),
        model_class=model_class,
        family=config.model_type.removesuffix("_seq2seq"),
        imports=imports,
        loader=loader or f"luna_mega.{model_class}",
        without_package_sentence=WITHOUT_PACKAGE,
        without_package=loading_without_package(cls, "..."),
        pairs=tokenizer and suffix == "ForSequencePairClassification",
        architecture={field: markdown(value) for field, value in architecture(config).items()},
        parameters=f"{parameters:,}",
        source={name: code(source[name]) for name in ("file", "sha256", "arch")} | {"software": software},
        report=code_block("\n".join(line for line in report.splitlines() if not line.startswith("written "))),
    )


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of the configuration that describe the architecture of a model, and their values."""
    fields = FIELDS[config.model_type.removesuffix("_seq2seq")]
    return {field: getattr(config, field) for field in fields if INPUT_OF_FIELD.get(field) in (None, config.input_type)}


def _suffix(model_class: str, config: PreTrainedConfig) -> str:
    return model_class.removeprefix(type(config).__name__.removesuffix("Config").removesuffix("Seq2Seq"))


def task_of(model_class: str, config: PreTrainedConfig) -> str | None:
    """Return the Hub's name of the task of a model; None for real-valued input, which no pipeline accepts."""
    values = getattr(config, "input_type", "tokens") == "values"
    return None if values else _TASKS.get(_suffix(model_class, config))


def license_metadata(license: str | None) -> dict[str, str]:
    """Return the metadata of a license for a model card.

    Args:
        license: Identifier of the Hub ("mit"), or "other:NAME" for any other license, with a name of lowercase letters,
            digits, "-" and "."; None for no license.

    Raises:
        ConversionError: If the license does not have this form.
    """
    if license is None:
        return {}
    if license in _LICENSES:
        return {"license": license}
    kind, _, name = license.partition(":")
    if kind == "other" and re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}", name):
        return {"license": "other", "license_name": name}
    raise ConversionError(
        f"license {shown(license)} is not one of the Hub's identifiers, such as mit, apache-2.0 or cc-by-4.0; use "
        "other:NAME for any other license, with lowercase letters, digits, - and . in NAME"
    )
