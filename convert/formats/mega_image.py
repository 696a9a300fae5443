"""mega_image: Mega for pictures, saved by the training script that the authors took from DeiT."""

import argparse
import math
from typing import Any

from luna_mega import MegaConfig, MegaForImageClassification
from luna_mega.convert.argmap import NOT, Arg, build_config, fixed, read_fields
from luna_mega.convert.argtypes import flag, number, size, whole, word
from luna_mega.convert.dictionary_kinds import ClassNames
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.formats import _mega
from luna_mega.convert.formats._base import Revision, Tensors
from luna_mega.convert.keymap import KeyMap, Reshape, Row
from luna_mega.convert.plan import Plan, Target
from luna_mega.errors import ConversionError

_PATCHES = "patch_embed.pemb.proj.weight"
_STACK = _mega.Stack("", "blocks")
# Widths of tokens, values and the feed-forward layer, and of queries and keys -> the architecture.
_NAMES = {
    (768, 1536, 1536, 256): "mega_base_patch16_224",
    (192, 384, 384, 64): "mega_tiny_patch16_224",
}


def _side(evidence: Evidence) -> int:
    """Return the number of patches in a row."""
    (entries,) = evidence.shape("blocks.0.mega_layer.rel_pos_bias.rel_pos_bias", "2 patches - 1")
    side = math.isqrt((entries + 1) // 2)
    if 2 * side * side - 1 != entries:
        raise ConversionError(f"the bias table has {entries} entries, which belong to no square of patches")
    return side


def _patches(evidence: Evidence) -> tuple[int, int, int]:
    """Return the width, the number of channels and the size of a patch; linear patches have three channels."""
    if evidence.tensors[_PATCHES].dim() != 2:
        return evidence.shape(_PATCHES, "width", "channels", "patch", "patch")[:3]
    width, numbers = evidence.shape(_PATCHES, "width", "3 patch patch")
    size = math.isqrt(numbers // 3)
    if 3 * size * size != numbers:
        raise ConversionError(f"tensor {_PATCHES!r} has shape {[width, numbers]}, which no square patch has")
    return width, 3, size


def _reshape(config: MegaConfig) -> Reshape:
    """Return the change of linear patches into a convolution, which is the same function."""
    shape = (-1, config.num_channels, config.patch_size, config.patch_size)
    return Reshape(lambda weight: weight.reshape(shape), lambda weight: weight.flatten(1))


def _patch_size(evidence: Evidence) -> int:
    return _patches(evidence)[2]


def _classes(evidence: Evidence) -> int:
    return evidence.shape("head.weight", "classes", "width")[0]


def _no_positions(evidence: Evidence) -> bool:
    there = "pos_embed" in evidence.tensors
    return False if evidence.args.get("no_pos_emb") is False else evidence.prefer("no_pos_emb", not there)


def _representation(evidence: Evidence) -> dict[str, int]:
    if not evidence.args.get("representation_size") and "pre_logits.fc.weight" not in evidence.tensors:
        return {"classifier_num_layers": 0}
    size, _ = evidence.shape("pre_logits.fc.weight", "representation", "width")
    return {"classifier_num_layers": 1, "classifier_hidden_size": evidence.prefer("representation_size", size)}


def _hidden(target: Target) -> int | None:
    return target.config.classifier_hidden_size if target.config.classifier_num_layers else None


def _name(target: Target) -> str:
    config = target.config
    widths = (config.hidden_size, config.intermediate_size, config.nffn_hidden_size, config.shared_representation_size)
    sizes = (config.num_hidden_layers, config.ema_projection_size, config.patch_size, config.image_size)
    return _NAMES.get(widths if sizes == (12, 16, 16, 224) else None, "mega")


_TABLE = (
    Arg("model", write=_name, kept=True, kind=word),
    Arg("input_size", "image_size", measure=lambda evidence: _side(evidence) * _patch_size(evidence), kind=size),
    Arg("nb_classes", "num_labels", measure=_classes, kind=whole),
    _STACK.norm_type("norm_type"),
    Arg("patch_impl", write=lambda target: target.revision, kind=word),
    Arg("no_pos_emb", "use_absolute_position_embeddings", NOT, measure=_no_positions, kind=flag),
    Arg("representation_size", read=_representation, write=_hidden, kind=whole),
    Arg("drop", "dropout_prob", default=0.0, kind=number),
    Arg("drop_path", "drop_path_rate", default=0.2, kind=number),
    fixed("model_ema", False),
)


class MegaImage(_mega.MegaFormat):
    """Classifiers of pictures. The args name neither widths nor depth; the tensors do."""

    name = "mega_image"
    revisions = {
        name: Revision(f"Mega for pictures, {patches}", f"variant with {patches}", "the Mega code for pictures")
        for name, patches in (("conv", "patches by convolution"), ("linear", "linear patches"))
    }
    written = ("conv",)
    refused = _mega.MegaFormat.refused | {"ema-convention": "the code for pictures has one convention"}
    classes = classifiers = (MegaForImageClassification,)
    needs_args = False
    table = _TABLE

    def recognise(self, tensors: Tensors, args: dict[str, Any]) -> str | None:
        """Return how the patches are embedded."""
        if _PATCHES not in tensors or not any(key.startswith("blocks.0.mega_layer.") for key in tensors):
            return None
        return "linear" if tensors[_PATCHES].dim() == 2 else "conv"

    def refusal(self, tensors: Tensors, arch: str) -> str | None:
        """Return why a vision model of the same library cannot be converted."""
        if not any(key.startswith("blocks.0.") for key in tensors) or not any("patch_embed." in key for key in tensors):
            return None
        return "a vision model without a Mega layer (there is no 'blocks.0.mega_layer.*'); load it with timm"

    def decide_revision(self, revision: str, tensors: Tensors, ema_convention: str) -> tuple[str, str | None]:
        """Return the revision."""
        return revision, None

    def assumed(self, revision: str) -> str:
        """Return the revision."""
        return revision

    def architecture(self, args: dict[str, Any]) -> str:
        """Return the name of the model."""
        return str(args.get("model"))

    def plan(self, evidence: Evidence, head: str | None = None) -> Plan:
        """Return the plan of a picture classifier."""
        width, colours, patch = _patches(evidence)
        fields = read_fields(self.table, evidence) | {
            "hidden_size": width,
            "num_channels": colours,
            "patch_size": patch,
            "num_hidden_layers": evidence.layers("blocks"),
            "intermediate_size": _STACK.values(evidence),
            "nffn_hidden_size": evidence.shape("blocks.0.nffn.fc1.weight", "ffn width", "width")[0],
            "shared_representation_size": _STACK.shared(evidence),
            "ema_projection_size": _STACK.dimensions(evidence),
        }
        config = build_config(MegaConfig.image_base_patch16_224, self.table, evidence, **fields)
        return Plan(
            MegaForImageClassification,
            config,
            self.keymap(config, evidence.revision),
            num_labels=config.num_labels,
            decisions={"image_size": config.image_size, "patch_size": patch, "patches": evidence.revision}
            | {name: getattr(config, name) for name in ("normalization_type", "use_absolute_position_embeddings")},
            warnings=evidence.warnings,
        )

    def dictionaries(self, plan: Plan, task: str | None) -> ClassNames:
        """Return the names of the classes: there is no other dictionary."""
        return ClassNames(plan.num_labels)

    def tokenizer(self, plan: Plan, dictionaries: Any, bpe: Any) -> None:
        """Return None: pictures have no tokens."""
        if bpe is not None:
            raise ConversionError(f"--bpe {bpe}: pictures have no tokens; leave the option out")

    def preprocessor(self, config: MegaConfig) -> dict[str, Any]:
        """Return the evaluation transform of the original: shorter side to 256 / 224 of the size, centre crop."""
        size = config.image_size
        return {
            "image_processor_type": "LevitImageProcessor",
            "size": {"shortest_edge": size},
            "crop_size": {"height": size, "width": size},
        }

    def keymap(self, config: MegaConfig, revision: str, head: str | None = None) -> KeyMap:
        """Return the map of a file."""
        return KeyMap(
            [
                Row("pos_embed", "mega.embedding_layer.position_embeddings"),
                Row(
                    _PATCHES,
                    "mega.embedding_layer.patch_embeddings.projection.weight",
                    _reshape(config) if revision == "linear" else None,
                ),
                Row("patch_embed.pemb.proj.{part}", "mega.embedding_layer.patch_embeddings.projection.{part}"),
                *_mega.block_rows("blocks.{layer}", "mega.layers.{layer}", "flash"),
                *_mega.norm_rows("final_norm", "mega.final_norm"),
                Row("out_proj.fc.{part}", "mega.output_projection.dense.{part}"),
                Row("pre_logits.fc.{part}", "classifier.dense.{part}"),
                Row("head.{part}", "classifier.out_proj.{part}"),
            ]
        )

    def allowed(self, target: Target) -> dict[str, tuple]:
        """Return the values that the original can express."""
        config = target.config
        usual = MegaConfig.image_base_patch16_224()
        fixed_fields = (
            "activation", "attention_activation", "bidirectional", "classifier_bias", "embedding_norm", "ema_shift",
            "final_norm", "final_norm_affine", "input_type", "legacy_bias_table", "norm_affine",
            "normalize_before_ffn", "normalize_before_mega", "output_projection", "pooling",
            "relative_positional_bias", "scale_embedding", "truncation", "use_chunking", "use_normalized_ffn",
            "add_token_type_embeddings",
        )  # fmt: skip
        fields = {name: (getattr(usual, name),) for name in fixed_fields} | {
            "num_channels": (3,),
            "normalization_type": ("layernorm", "scalenorm", "batchnorm", "syncbatchnorm"),
            "classifier_num_layers": (0, 1),
            "embedding_size": (config.hidden_size,),
        }
        return fields | ({"classifier_activation": ("silu",)} if config.classifier_num_layers else {})

    def remarks(self, target: Target, args: dict[str, Any], left_out: list[str]) -> list[str]:
        """Return notes on an exported file."""
        if args["model"] not in _NAMES.values():
            return [f"the original has no model of these sizes: register one as args.model = {args['model']!r} there"]
        return []

    def state(self, args: dict[str, Any], tensors: Tensors, num_updates: int) -> dict[str, Any]:
        """Return the content of a file as the training script saves it, without optimizer state."""
        return {
            "model": tensors,
            "epoch": 0,
            "steps": num_updates,
            "model_ema": None,
            "scaler": {},
            "args": argparse.Namespace(**args),
        }
