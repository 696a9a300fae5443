"""Writers of Luna's formats."""

import torch
from torch import nn
from transformers import PreTrainedConfig

from luna_mega import LunaConfig, LunaForMultipleChoice, LunaSeq2SeqConfig
from luna_mega.convert.evidence import Evidence, ModelSpec, problem_type
from luna_mega.convert.export import fairseq
from luna_mega.convert.export.writer import Args, Tensors, Writer, register_writer
from luna_mega.convert.formats._lra import BODY, is_pair
from luna_mega.convert.formats._luna import CODE_2021, CODE_2023
from luna_mega.convert.formats.luna_bert import ARCHITECTURES, LM_HEAD, POOLING_OF_HEAD, SIZES, LunaBert, names_of_heads
from luna_mega.convert.formats.luna_lra import PAIRS, LunaLra
from luna_mega.convert.formats.luna_seq2seq import LunaSeq2Seq
from luna_mega.modeling_luna.configuration_luna import DECODER_FIELDS
from luna_mega.modeling_luna.modeling_luna import LunaLMHead, sinusoids

_HEAD_OF_POOLING = {pooling: head for head, pooling in POOLING_OF_HEAD.items()}
_LRA_OF_WIDTH = {512: "luna_lra_listop", 256: "luna_lra_imdb", 128: "luna_lra_pf32", 64: "luna_lra_cifar10"}


def _activations(spec: ModelSpec) -> tuple[str, ...]:
    """Return the activations of a revision. The 2023 code replaced `tanh` by `silu`; earlier files have either."""
    return tuple(name for name in fairseq.ACTIVATIONS if spec.revision == CODE_2023 or name != "silu")


class _LunaWriter(Writer):
    advice = "to export only the encoder, load the folder as LunaModel and save it"
    training_fields = tuple(
        "dropout attention_dropout activation_dropout word_dropout layerdrop classifier_dropout problem_type".split()
    )

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        config = spec.config
        return {
            "hidden_act": _activations(spec),
            "contextual_projection": (True,),
            "pad_token_id": (1 if config.input_type == "tokens" else config.pad_token_id,),
            "first_position": (None,),
            "embedding_size": (config.hidden_size,),
        }


def _encoder(spec: ModelSpec) -> Args:
    """Return the args of encoders that the table does not contain."""
    later = {"stop_min_lr": -1} if spec.revision == CODE_2023 else {}  # only the 2023 code has this option
    return fairseq.COMMON | {"tokens_per_sample": spec.config.max_position_embeddings} | later


def _sinusoids(body: str, config: LunaConfig, tensors: Tensors) -> Tensors:
    """Return the buffers of sinusoidal positions."""
    if config.position_embedding_type != "sinusoidal":
        return {}
    buffers = {f"{body}.embed_positions._float_tensor": torch.zeros(1)}
    if not config.add_cross_attention:
        table = sinusoids(torch.arange(config.projection_length), config.hidden_size)
        buffers[f"{body}.projected_positions"] = table
    return {name: tensor.to(fairseq.dtype_of(tensors)) for name, tensor in buffers.items()}


def _task(spec: ModelSpec) -> str:
    if spec.head is None or spec.config.classifier_hidden_size != spec.config.hidden_size:
        return "masked_lm"  # the other tasks build a head of width d before they read the file
    return "sentence_ranking" if spec.model_class is LunaForMultipleChoice else "sentence_prediction"


@register_writer(LunaBert)
class LunaBertWriter(_LunaWriter):
    """Writer of `luna_bert`."""

    revisions = (CODE_2021,)
    note_of_added = "the folder has no LM head, which fairseq's loader requires: a new, untrained one is written"
    criteria = {
        "masked_lm": "MaskedLmLoss",
        "sentence_prediction": "SentencePredictionCriterion",
        "sentence_ranking": "SentenceRankingCriterion",
    }

    def args(self, spec: ModelSpec, args: Args) -> Args:
        config, head, task = spec.config, spec.head, _task(spec)
        sizes = {name: args[name] for name in SIZES}  # the args have all sizes, so another architecture is valid
        usual = f"luna_base_{'tied' if config.tie_key_value else 'untied'}_512"
        arch = next((arch for arch, own in ARCHITECTURES.items() if own == sizes), usual)
        args |= _encoder(spec) | {"arch": arch, "task": task, "criterion": task}
        if head is None:
            del args["pooler_activation_fn"], args["pooler_dropout"]
        elif task == "sentence_ranking":
            # The num_classes of this task is the number of options, which the model does not have.
            args["ranking_head_name"] = head
        else:
            args |= {"num_classes": config.num_labels, "classification_head_name": head}
            args["regression_target"] = problem_type(config) == "regression"
        return args

    def added(self, spec: ModelSpec, tensors: Tensors) -> Tensors:
        if f"{LM_HEAD}.dense.weight" in tensors:
            return {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same file every time
            head = LunaLMHead(spec.config)
            for linear in (head.dense, head.decoder):
                nn.init.normal_(linear.weight, std=spec.config.initializer_range)
                nn.init.zeros_(linear.bias)
        dtype, weights = fairseq.dtype_of(tensors), head.state_dict().items()
        return {f"{LM_HEAD}.{name.removeprefix('decoder.')}": weight.to(dtype) for name, weight in weights}

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        config = spec.config
        one_of_several = spec.model_class is LunaForMultipleChoice  # this task builds a head of width d
        return {
            "classifier_activation": (config.classifier_activation,) if spec.head is None else _activations(spec),
            "classifier_hidden_size": (config.hidden_size if one_of_several else config.classifier_hidden_size,),
            "input_type": ("tokens",),
            "position_embedding_type": ("learned",),
            "share_layers": (False,),
        } | super().limits(spec)

    def unused(self, spec: ModelSpec) -> set[str]:
        return {"num_labels", "drop_first_token"} if spec.model_class is LunaForMultipleChoice else set()

    def head(self, config: PreTrainedConfig) -> str:
        return _HEAD_OF_POOLING.get(config.pooling, _HEAD_OF_POOLING["cls"])

    def notes(self, spec: ModelSpec, evidence: Evidence) -> list[str]:
        notes = []
        if lost := names_of_heads(evidence.left_out):
            notes.append(f"the conversion left out the heads {', '.join(lost)}: they are not in the file")
        if spec.head is not None and evidence.args.get("task") == "masked_lm":
            notes.append(f"the task in args is masked_lm: luna-mega convert takes the head with --head {spec.head}")
        return notes


@register_writer(LunaLra)
class LunaLraWriter(_LunaWriter):
    """Writer of `luna_lra`."""

    revisions = (CODE_2021, CODE_2023)
    criteria = fairseq.LRA_CRITERIA

    def args(self, spec: ModelSpec, args: Args) -> Args:
        config, later = spec.config, spec.revision == CODE_2023
        values, pair = config.input_type == "values", is_pair(spec)
        # The args have all sizes, so another architecture is valid as well.
        arch = "luna_lra_aan" if pair else _LRA_OF_WIDTH.get(config.hidden_size, "luna_lra_imdb")
        features = (PAIRS[spec.revision][0] if pair else 1) * config.hidden_size
        args |= _encoder(spec) | fairseq.LRA | {"arch": arch, "layer_type": "luna", "classifier_in_dim": features}
        args["encoder_learned_pos"] = config.position_embedding_type == "learned"
        args["sen_rep_type"] = "mp" if config.pooling == "mean" or values else "cls"
        args["use_p"] = config.pooling == "packed_mean"
        if later:
            task = "lra-image" if values else "lra-text"
            return args | {"task": task, "pre_logits": config.classifier_num_layers == 1}
        del args["input_type"]
        return args | {"task": "long_range_arena", "classifier_out_dim": config.classifier_hidden_size}

    def added(self, spec: ModelSpec, tensors: Tensors) -> Tensors:
        return _sinusoids(BODY, spec.config, tensors) if spec.revision == CODE_2023 else {}

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        config, later = spec.config, spec.revision == CODE_2023
        fixed_width = later and config.classifier_num_layers
        activation = {} if later else {"classifier_activation": _activations(spec)}
        return activation | {
            "input_type": ("tokens", "values")[: 1 + later],
            "classifier_num_layers": (0, 1) if later else (config.classifier_num_layers or 1,),
            "classifier_hidden_size": (config.hidden_size if fixed_width else config.classifier_hidden_size,),
            **super().limits(spec),
        }


@register_writer(LunaSeq2Seq)
class LunaSeq2SeqWriter(_LunaWriter):
    """Writer of `luna_seq2seq`."""

    revisions = (CODE_2021,)
    kept = fairseq.KEPT_OF_TRANSLATION
    criteria = fairseq.TRANSLATION_CRITERIA

    def args(self, spec: ModelSpec, args: Args) -> Args:
        config, width = spec.config, spec.config.hidden_size
        args |= fairseq.translation(spec)
        args["arch"] = f"luna_base_{'tied' if config.tie_key_value else 'untied'}"  # the args have all sizes
        args |= dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), width)
        args["encoder_learned_pos"] = config.position_embedding_type == "learned"
        args["decoder_learned_pos"] = config.decoder_position_embedding_type == "learned"
        args["no_token_positional_embeddings"] = config.position_embedding_type == "none"
        return args | {"encoder_layers_to_keep": None, "decoder_layers_to_keep": None}

    def added(self, spec: ModelSpec, tensors: Tensors) -> Tensors:
        return {
            **{f"{side}.version": torch.tensor([3.0]) for side in ("encoder", "decoder")},
            **_sinusoids("encoder", spec.config, tensors),
            **_sinusoids("decoder", spec.config.decoder_config, tensors),
        }

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        return {"share_layers": (False,)} | super().limits(spec)

    def resolve(self, config: LunaSeq2SeqConfig) -> LunaSeq2SeqConfig:
        return fairseq.resolve(config, DECODER_FIELDS)
