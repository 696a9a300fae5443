"""mega_image: Mega for images, saved by the authors' training script, which is based on DeiT's."""

import math
from functools import partial

from luna_mega import MegaConfig, MegaForImageClassification
from luna_mega.convert.dictionaries import ClassNames
from luna_mega.convert.evidence import Evidence, ModelSpec, flag, integer, number, size, word
from luna_mega.convert.formats import _mega
from luna_mega.convert.formats.format import Companions, Container, Facts, Format, Notes
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import NOT, Arg, derived, fields, size_of, typed
from luna_mega.errors import ConversionError

_PATCHES = "patch_embed.pemb.proj.weight"
_STACK = _mega.Stack("", "blocks")
_UNSUPPORTED = _mega.FACTS["unsupported_options"] | {"ema-convention": "the code for images has one convention"}


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


def _no_positions(evidence: Evidence) -> bool:
    missing = "pos_embed" not in evidence.tensors
    return False if evidence.args.get("no_pos_emb") is False else evidence.prefer("no_pos_emb", missing)


def _representation(evidence: Evidence) -> dict[str, int]:
    if not evidence.args.get("representation_size") and "pre_logits.fc.weight" not in evidence.tensors:
        return {"classifier_num_layers": 0}
    size, _ = evidence.shape("pre_logits.fc.weight", "representation", "width")
    return {"classifier_num_layers": 1, "classifier_hidden_size": evidence.prefer("representation_size", size)}


_TABLE = (
    *typed(word, "model"),
    Arg("input_size", "image_size", read=lambda evidence: _side(evidence) * _patches(evidence)[2], kind=size),
    Arg("nb_classes", "num_labels", read=size_of("head.weight", "classes", "width"), kind=integer),
    _STACK.norm_type("norm_type"),
    Arg("no_pos_emb", "use_absolute_position_embeddings", NOT, read=_no_positions, kind=flag),
    Arg("representation_size", read=_representation, kind=integer),
    Arg("drop", "dropout_prob", default=0.0, kind=number),
    Arg("drop_path", "drop_path_rate", default=0.2, kind=number),
    # The args do not have these sizes.
    fields(lambda evidence: dict(zip(("num_channels", "patch_size"), _patches(evidence)[1:], strict=True))),
    derived("num_hidden_layers", partial(Evidence.layers, prefix="blocks")),
    derived("hidden_size", lambda evidence: _patches(evidence)[0]),
    derived("intermediate_size", _STACK.values),
    derived("shared_representation_size", _STACK.shared),
    derived("ema_projection_size", _STACK.dimensions),
    derived("nffn_hidden_size", size_of("blocks.0.nffn.fc1.weight", "ffn width", "width")),
)


class MegaImage(Format):
    """Image classifiers. The args have neither widths nor depth, so the tensors determine them."""

    facts = Facts(
        name="mega_image",
        revisions={
            "conv": "variant with patches by convolution",
            "linear": "variant with linear patches",
        },
        model_classes=(MegaForImageClassification,),
        stacks=frozenset({("mega", "")}),
        make_config=MegaConfig.image_base_patch16_224,
        container=Container(arch="model", needs_args=False),
        decided=("normalization_type", "use_absolute_position_embeddings"),
        **_mega.FACTS | {"unsupported_options": _UNSUPPORTED},
    )
    table = _TABLE

    def recognize(self, file: Checkpoint) -> str | None:
        if _PATCHES not in file.tensors:
            return None
        return "linear" if file.tensors[_PATCHES].dim() == 2 else "conv"

    def keymap(self, spec: ModelSpec) -> KeyMap:
        to_patches = "mega.embedding_layer.patch_embeddings.projection"
        config, linear = spec.config, spec.revision == "linear"
        shape = (-1, config.num_channels, config.patch_size, config.patch_size)
        return KeyMap(
            [
                Row("pos_embed", "mega.embedding_layer.position_embeddings"),
                # A matrix of linear patches is equivalent to a convolution.
                Row(_PATCHES, f"{to_patches}.weight", (lambda weight: weight.reshape(shape)) if linear else None),
                Row("patch_embed.pemb.proj.bias", f"{to_patches}.bias"),
                *_mega.block_rows("blocks.{layer}", "mega.layers.{layer}", "flash"),
                *_mega.norm_rows("final_norm", "mega.final_norm"),
                Row("out_proj.fc.{part}", "mega.output_projection.dense.{part}"),
                Row("pre_logits.fc.{part}", "classifier.dense.{part}"),
                Row("head.{part}", "classifier.out_proj.{part}"),
            ]
        )

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        # The evaluation transform: resize the shorter side to 256 / 224 of the size, then crop the center.
        size = spec.config.image_size
        preprocessor = {
            "image_processor_type": "LevitImageProcessor",
            "size": {"shortest_edge": size},
            "crop_size": {"height": size, "width": size},
        }
        return Companions(ClassNames(spec.config.num_labels), preprocessor=preprocessor)

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        config = spec.config
        return Notes({"image_size": config.image_size, "patch_size": config.patch_size, "patches": spec.revision})
