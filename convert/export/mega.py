"""Writers of Mega's formats."""

import argparse
from typing import Any

import torch

from luna_mega import MegaConfig, MegaSeq2SeqConfig
from luna_mega.convert.conventions import ORDER
from luna_mega.convert.evidence import Evidence, ModelSpec
from luna_mega.convert.export import fairseq
from luna_mega.convert.export.writer import Args, Export, Tensors, Writer, register_writer
from luna_mega.convert.formats._lra import BODY, is_pair
from luna_mega.convert.formats._translation import SIDES
from luna_mega.convert.formats.mega_image import MegaImage
from luna_mega.convert.formats.mega_lm import MegaLM
from luna_mega.convert.formats.mega_lra import MegaLra
from luna_mega.convert.formats.mega_seq2seq import MegaSeq2Seq
from luna_mega.modeling_mega.configuration_mega import DECODER_FIELDS

_ACTIVATIONS = tuple(name for name in fairseq.ACTIVATIONS if name != "tanh")
# Fields for initialization, or without effect.
_UNUSED_FIELDS = {"ema_beta_range", "ema_delta_alpha_range", "ema_gamma_omega_range", "type_vocab_size"}
# Fields of the output layer of a language model.
_FIELDS_OF_LM = set(
    "add_lm_hidden_dense_layer lm_head_bias tie_word_embeddings adaptive_softmax_cutoffs adaptive_softmax_factor "
    "adaptive_softmax_dropout tie_adaptive_projections legacy_adaptive_loss".split()
)
# Width -> architecture. The args have all sizes, so another architecture is valid as well.
_OF_TEXT = {80: "mega_lra_listop"}
_OF_IMAGES = {64: "mega_lra_pf128", 128: "mega_lra_pf32"}
_OF_SPEECH = {60: "mega_sc_raw_base", 72: "mega_sc_raw_big"}
# Widths of tokens, values and the feed-forward layer, and of queries and keys -> the architecture.
_IMAGE_MODELS = {(768, 1536, 1536, 256): "mega_base_patch16_224", (192, 384, 384, 64): "mega_tiny_patch16_224"}


class _MegaWriter(Writer):
    chunk = "chunk_size"  # argument with the length of a chunk
    revisions = tuple(ORDER)
    training_fields = tuple(
        "dropout_prob hidden_dropout_prob attention_probs_dropout_prob nffn_activation_dropout_prob classifier_dropout "
        "drop_path_rate problem_type use_feature_dropout padded_batch_statistics adaptive_softmax_dropout "
        "legacy_adaptive_loss".split()
    )

    def args(self, spec: ModelSpec, args: Args) -> Args:
        if not spec.config.use_normalized_ffn:
            args |= {name: 0 for name in args if name.endswith("ffn_embed_dim")}
        return args | {self.chunk: spec.config.attention_chunk or -1}

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        before = spec.config.normalize_before_mega
        return {
            "activation": _ACTIVATIONS,
            "embedding_norm": (False,) if before else (False, True),
            "norm_affine": (True,),  # the parameters of a norm determine its kind
            "normalize_before_ffn": (before,),
            "final_norm": (before,),
        }

    def unused(self, spec: ModelSpec) -> set[str]:
        config, no_softmax = spec.config, spec.config.adaptive_softmax_cutoffs is None
        conditions = {
            "image_size patch_size num_channels use_absolute_position_embeddings": config.input_type != "patches",
            "adaptive_input_factor": config.adaptive_input_cutoffs is None,
            "adaptive_softmax_dropout legacy_adaptive_loss": no_softmax,
            "adaptive_softmax_factor": no_softmax or config.tie_word_embeddings,
            "final_norm_affine": not config.final_norm,
            "chunk_size": not config.use_chunking,
            "nffn_hidden_size nffn_activation_dropout_prob normalize_before_ffn": not config.use_normalized_ffn,
        }
        return _UNUSED_FIELDS.union(*(names.split() for names, applies in conditions.items() if applies))


def _buffers(body: str, config: MegaConfig, *attentions: str) -> Tensors:
    """Return the placeholder buffers of rotary biases."""
    if config.relative_positional_bias != "rotary":
        return {}
    layers = [f"{body}.layers.{layer}.{name}" for layer in range(config.num_hidden_layers) for name in attentions]
    return {f"{layer}.rel_pos_bias._float_tensor": torch.zeros(1) for layer in layers}


def _is_speech(spec: ModelSpec) -> bool:
    # The code for speech always has a classifier layer, and no norm on the embeddings.
    config = spec.config
    is_size = config.input_type == "values" and config.hidden_size in _OF_SPEECH
    return is_size and bool(config.classifier_num_layers) and not config.embedding_norm


@register_writer(MegaLra)
class MegaLraWriter(_MegaWriter):
    """Writer of `mega_lra`."""

    kept = ("arch", "task")
    criteria = fairseq.LRA_CRITERIA

    def args(self, spec: ModelSpec, args: Args) -> Args:
        config, width, speech, pair = spec.config, spec.config.hidden_size, _is_speech(spec), is_pair(spec)
        if config.input_type == "tokens":
            arch, task = "mega_lra_aan" if pair else _OF_TEXT.get(width, "mega_lra_imdb"), "lra-text"
        elif speech:
            arch, task = _OF_SPEECH[width], "speech_commands"
            del args["input_type"]
        else:
            arch, task = _OF_IMAGES.get(width, "mega_lra_cifar10"), "lra-image"
        del args["no_affine_final_norm"]
        features = (2 if pair else 1) * width
        args |= fairseq.COMMON | fairseq.LRA | {"arch": arch, "task": task, "layer_type": "mega", "use_p": False}
        args |= {"apply_bert_init": False, "tokens_per_sample": config.max_positions, "classifier_in_dim": features}
        args["classifier_out_dim"] = config.classifier_hidden_size if config.classifier_num_layers else features
        return super().args(spec, args)

    def added(self, spec: ModelSpec, tensors: Tensors) -> Tensors:
        return _buffers(BODY, spec.config, "mega_layer")

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        config, tokens = spec.config, spec.config.input_type == "tokens"
        return super().limits(spec) | {
            "pooling": ("cls", "mean") if tokens else ("mean",),
            "classifier_activation": _ACTIVATIONS if config.classifier_num_layers else (config.classifier_activation,),
            "input_type": ("tokens",) if is_pair(spec) else ("tokens", "values"),
        }

    def unused(self, spec: ModelSpec) -> set[str]:
        return super().unused(spec) | _FIELDS_OF_LM


@register_writer(MegaLM)
class MegaLMWriter(_MegaWriter):
    """Writer of `mega_lm`."""

    kept = ("arch", "task")
    criteria = {"adaptive_loss": "AdaptiveLoss"}
    chunk = "decoder_chunk_size"

    def args(self, spec: ModelSpec, args: Args) -> Args:
        config, adaptive = spec.config, spec.config.adaptive_softmax_cutoffs is not None
        tied = config.tie_word_embeddings
        args |= fairseq.COMMON | {
            "task": "language_modeling",
            "arch": "mega_lm_adaptive_big" if adaptive else "mega_lm",  # the args have all sizes
            "criterion": "adaptive_loss" if adaptive else "cross_entropy",
            "sample_break_mode": "complete",
            "tokens_per_sample": config.max_positions,
            "output_dictionary_size": -1,
            **dict.fromkeys(("self_target", "future_target", "past_target", "add_bos_token"), False),
            "shorten_method": "none",
            "shorten_data_split_list": "",
            "variant_block_multiple_min": 1,
            "variant_block_multiple_max": 1,
            "valid_block": "splits:10",
            "decoder_embed_path": None,
            "share_decoder_input_output_embed": tied and not adaptive,
            "share_all_embeddings": False,
            "adaptive_input": config.adaptive_input_cutoffs is not None,
            "adaptive_softmax_factor": config.adaptive_input_factor if tied else config.adaptive_softmax_factor,
            "tie_adaptive_weights": tied and adaptive,
        }
        for name in ("adaptive_input_cutoff", "adaptive_softmax_cutoff"):
            args[name] = None if args[name] is None else ",".join(map(str, args[name]))
        return super().args(spec, args)

    def added(self, spec: ModelSpec, tensors: Tensors) -> Tensors:
        config, softmax = spec.config, "decoder.adaptive_softmax"
        buffers = {"decoder.version": torch.tensor([3.0])} | _buffers("decoder", config, "mega_layer")
        if config.adaptive_input_cutoffs is not None:
            buffers["decoder.embed_tokens._float_tensor"] = torch.zeros(1)
        if config.adaptive_softmax_cutoffs is not None:
            buffers[f"{softmax}.version"] = torch.tensor([1])
            if config.tie_word_embeddings:
                buffers[f"{softmax}.head._float_tensor"] = torch.zeros(1)
        return buffers

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        config = spec.config
        tied = config.tie_word_embeddings and config.adaptive_softmax_cutoffs is None
        return super().limits(spec) | {
            "embedding_size": (config.hidden_size if tied else config.embedding_size,),
            "adaptive_input_cutoffs": (None if tied else config.adaptive_input_cutoffs,),
        }

    def unused(self, spec: ModelSpec) -> set[str]:
        return super().unused(spec) | {"bos_token_id"}


@register_writer(MegaSeq2Seq)
class MegaSeq2SeqWriter(_MegaWriter):
    """Writer of `mega_seq2seq`."""

    kept = ("arch", *fairseq.KEPT_OF_TRANSLATION)
    criteria = fairseq.TRANSLATION_CRITERIA
    chunk = "encoder_chunk_size"

    def args(self, spec: ModelSpec, args: Args) -> Args:
        del args["no_affine_final_norm"]
        args |= fairseq.translation(spec) | {"arch": "mega"}  # the args have all sizes
        return super().args(spec, args)

    def added(self, spec: ModelSpec, tensors: Tensors) -> Tensors:
        return {
            **{f"{side}.version": torch.tensor([3.0]) for side in SIDES},
            **_buffers("encoder", spec.config.encoder_config, "mega_layer"),
            **_buffers("decoder", spec.config.decoder_config, "mega_layer", "cross_attn"),
        }

    def unused(self, spec: ModelSpec) -> set[str]:
        without = set() if spec.config.use_normalized_ffn else {"decoder_nffn_hidden_size"}
        return super().unused(spec) | _FIELDS_OF_LM - {"tie_word_embeddings"} | without | {"bos_token_id"}

    def resolve(self, config: MegaSeq2SeqConfig) -> MegaSeq2SeqConfig:
        full = fairseq.resolve(config, DECODER_FIELDS)
        full.decoder_chunk_size = config.decoder_config.attention_chunk or -1
        full.cross_attention_positions = config.cross_positions if config.relative_positional_bias == "simple" else None
        return full


@register_writer(MegaImage)
class MegaImageWriter(_MegaWriter):
    """Writer of `mega_image`, a file of DeiT's training script."""

    revisions = ("conv",)
    kept = ("model",)

    def args(self, spec: ModelSpec, args: Args) -> Args:
        config = spec.config
        attention = (config.nffn_hidden_size, config.shared_representation_size)
        widths = (config.hidden_size, config.intermediate_size, *attention)
        sizes = (config.num_hidden_layers, config.ema_projection_size, config.patch_size, config.image_size)
        model = _IMAGE_MODELS.get(widths if sizes == (12, 16, 16, 224) else None, "mega")
        hidden = config.classifier_hidden_size if config.classifier_num_layers else None
        return args | {
            "model": model,
            "patch_impl": spec.revision,
            "representation_size": hidden,
            "model_ema": False,
        }

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        return {
            "num_channels": (3,),
            "normalization_type": ("layernorm", "scalenorm", "batchnorm", "syncbatchnorm"),
            "relative_positional_bias": ("simple",),
            "use_normalized_ffn": (True,),
            "norm_affine": (True,),
        }

    def unused(self, spec: ModelSpec) -> set[str]:
        return super().unused(spec) | _FIELDS_OF_LM

    def notes(self, spec: ModelSpec, evidence: Evidence) -> list[str]:
        if (model := evidence.args.get("model")) in _IMAGE_MODELS.values():
            return []
        return [f"the original has no model of these sizes: register one as args.model = {model!r} in its code"]

    def state(self, export: Export) -> dict[str, Any]:
        training = {"epoch": 0, "steps": export.updates, "model_ema": None, "scaler": {}}
        return {"model": export.tensors, **training, "args": argparse.Namespace(**export.args)}
