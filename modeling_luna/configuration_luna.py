"""Configuration of the Luna models."""

from typing import Any, cast

from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.configuration import SharedConfig, strict
from luna_mega.modeling_luna.presets_luna import LunaPresets

_CHOICES = {
    "input_type": ("tokens", "values"),
    "position_embedding_type": ("learned", "sinusoidal", "none"),
    "pooling": ("cls", "last", "mean", "packed_max", "packed_mean", "packed_attention"),
    "pair_features": ("concat", "interaction"),
    "causal_activation": ("softplus", "elu"),
}
REMOVED_FIELDS = {
    "pack_method": ("attention", ""),
    "position_extension": (None, ""),
    "position_table_size": (None, ""),
    "initialization_options": (None, "; if the weights are trained, delete both fields of the initialization"),
    "initialization": ("original", "; if the weights are trained, delete both fields of the initialization"),
}
# Field of the decoder of an encoder-decoder -> the field of the encoder that is used if it is None.
DECODER_FIELDS = {
    "num_decoder_layers": "num_hidden_layers",
    "decoder_intermediate_size": "intermediate_size",
    "num_decoder_attention_heads": "num_attention_heads",
    "num_decoder_pack_attention_heads": "num_pack_attention_heads",
    "decoder_position_embedding_type": "position_embedding_type",
    "decoder_pre_norm": "pre_norm",
    "max_target_positions": "max_position_embeddings",
    "decoder_vocab_size": "vocab_size",
}


@strict
class LunaConfig(LunaPresets, SharedConfig, PreTrainedConfig):
    """Configuration of a Luna model (Linear Unified Nested Attention, Ma et al. 2021).

    The defaults equal `luna_base_tied_512`, which has the size of RoBERTa and 132 M parameters.

    Args:
        vocab_size: number of tokens; unused if `input_type` is `"values"`.
        hidden_size: width d of the model.
        embedding_size: width of the embeddings, which a linear layer projects to d; None = d. Encoders only.
        type_vocab_size: number of token types (`token_type_ids`); 0 = no token types. Not for encoder-decoders.
        num_hidden_layers: number of layers N.
        num_attention_heads: heads of the unpack attention.
        num_pack_attention_heads: heads of the pack attention; None = `num_attention_heads`.
        intermediate_size: width of the feed-forward layers.
        projection_length: rows l of the packed sequence P.
        dynamic_projection_length: a sequence of n tokens uses min(n, `projection_length`) rows of P, as the original
            does by default; False = always all rows (`--fix-projection-length`). None = True, except for a decoder
            without an encoder, whose n is unknown.
        contextual_projection: every layer updates P (paper section 3.1); False = every layer has a separate learned P
            (the ablation of Table 5, and section 3.3 for a decoder without an encoder). None = True, except for such a
            decoder.
        tie_key_value: one projection serves as key and value (section 4.2).
        hidden_act: activation of the feed-forward layers.
        dropout: probability on embeddings and on the outputs of attention and feed-forward layers.
        attention_dropout: probability on attention weights.
        activation_dropout: probability after `hidden_act`.
        layerdrop: probability of skipping a layer in training.
        input_type: `"tokens"` (`input_ids`) or `"values"` (`input_values`, real numbers).
        num_channels: Real numbers per position with `"values"`; 1 = `input_values` are `[B, T]`, C = `[B, T, C]`.
        max_position_embeddings: longest sequence with learned positions.
        position_embedding_type: `"learned"`, `"sinusoidal"` (any length; also added to P) or `"none"`.
        scale_embedding: multiply embeddings and P by sqrt(d); None = only with sinusoidal positions, as the original.
        embedding_norm: LayerNorm on the embeddings and on P.
        pre_norm: LayerNorm before attention and feed-forward, and once at the end; False = after each (section 3.1).
        share_layers: all layers share one set of weights.
        layer_norm_eps: epsilon of every LayerNorm.
        initializer_range: standard deviation of the initial weights; None = 0.02 if d >= 512, else 1 / sqrt(2 d), the
            deviation of the original's Xavier initialization of d x d matrices.
        pooling: input of a sequence classifier: the first token (`"cls"`), the last token (`"last"`), the mean over
            tokens (`"mean"`), or the packed sequence by max-pooling, mean (Table 3) or attention from the first token
            (`"packed_max"`, `"packed_mean"`, `"packed_attention"`). With `is_decoder=True` `"last"` or `"mean"`.
        pool_padding: a mean includes padding, as in the original LRA code; the result then depends on the batch.
        drop_first_token: remove the first token in sequence classification (in pairs only of the first sequence), as in
            the 2021 LRA code.
        classifier_num_layers: hidden layers of the classification head.
        classifier_hidden_size: their width; None = `hidden_size`.
        classifier_activation: their activation.
        classifier_dropout: probability before each layer of the classification head; None = `dropout`.
        classifier_bias: the last layer of the classification head has a bias.
        pair_features: features of the sequences a and b of a pair: `"concat"` [b, a] (the order of the 2021 LRA
            code) or `"interaction"` [a, b, a * b, a - b].
        pad_token_id: without an `attention_mask` these tokens are padding; None = no token is. It can be changed at any
            time, also in a model.
        first_position: first learned or sinusoidal position; None = `pad_token_id` + 1, as in fairseq. It is saved, and
            later changes of `pad_token_id` keep it. 0 saves rows if `pad_token_id` is large.
        tie_word_embeddings: the masked-LM output weight is the embedding.
        sparse_prediction: in training, the masked-LM head computes logits only for the M predicted positions,
            `[M, vocab_size]`, which reduces cost and memory.
        unpad_inputs: remove padding before the layers; states at padding are 0. Without effect if states or weights are
            returned, with a cache, and in compiled or exported programs.
        is_decoder: use causal attention (section 3.3), for `LunaForCausalLM`.
        is_encoder_decoder: True in `LunaSeq2SeqConfig` only. The fields above then describe the encoder, and the
            decoder unless there is a separate field below.
        add_cross_attention: the decoder attends to an encoder; set by `decoder_config`.
        causal_activation: weights of the causal pack: `"softplus"`, to base 2, or `"elu"`, elu + 1.
        word_dropout: probability of setting the embedding of a token to 0 in training.
        num_decoder_layers, decoder_intermediate_size, num_decoder_attention_heads: of the decoder; None = encoder's.
        num_decoder_pack_attention_heads: None = `num_decoder_attention_heads` if that is given, else the encoder's.
        decoder_position_embedding_type, decoder_pre_norm: of the decoder; None = the encoder's.
        max_target_positions: longest target with learned positions; None = `max_position_embeddings`.
        decoder_vocab_size: number of target tokens; None = `vocab_size`.
        share_encoder_decoder_embeddings: one embedding for both languages; None = if `tie_word_embeddings` is True and
            the vocabularies have the same size.
        decoder_start_token_id: first token of decoder inputs; fairseq starts with `</s>`.
        use_cache: a decoder returns its cache in evaluation.

    Raises:
        ValueError: The fields do not fit together.

    Example:
        >>> LunaConfig.base_512(tied=False).tie_key_value
        False
    """

    model_type = "luna"
    default_fields = {
        "num_pack_attention_heads": "num_attention_heads", "embedding_size": "hidden_size",
        "classifier_hidden_size": "hidden_size", "classifier_dropout": "dropout",
    }  # fmt: skip
    decoder_fields = DECODER_FIELDS
    removed_fields = REMOVED_FIELDS
    stored_fields = frozenset({"first_position"})
    chunks_feed_forward = True
    attribute_map = {
        "d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "activation": "hidden_act",
        "dropout_prob": "dropout", "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }  # fmt: skip
    base_model_fsdp_plan = {
        "embeddings.word_embeddings": "free_full_weight",
        "encoder.layers.*": "free_full_weight",
        "decoder.layers.*": "free_full_weight",
    }

    vocab_size: int = 50265
    hidden_size: int = 768
    embedding_size: int | None = None
    type_vocab_size: int = 0
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_pack_attention_heads: int | None = None
    intermediate_size: int = 3072
    projection_length: int = 128
    dynamic_projection_length: bool | None = None
    contextual_projection: bool | None = None
    tie_key_value: bool = True
    hidden_act: str = "gelu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.0
    layerdrop: float | int = 0.0
    input_type: str = "tokens"
    num_channels: int = 1
    max_position_embeddings: int = 512
    position_embedding_type: str = "learned"
    scale_embedding: bool | None = None
    embedding_norm: bool = True
    pre_norm: bool = False
    share_layers: bool = False
    layer_norm_eps: float = 1e-5
    initializer_range: float | None = None
    pooling: str = "cls"
    pool_padding: bool = False
    drop_first_token: bool = False
    classifier_num_layers: int = 1
    classifier_hidden_size: int | None = None
    classifier_activation: str = "tanh"
    classifier_dropout: float | int | None = 0.0
    classifier_bias: bool = True
    pair_features: str = "concat"
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    first_position: int | None = None
    tie_word_embeddings: bool = True
    sparse_prediction: bool = False
    unpad_inputs: bool = False
    is_decoder: bool = False
    is_encoder_decoder: bool = False
    add_cross_attention: bool = False
    causal_activation: str = "softplus"
    word_dropout: float | int = 0.0
    num_decoder_layers: int | None = None
    decoder_intermediate_size: int | None = None
    num_decoder_attention_heads: int | None = None
    num_decoder_pack_attention_heads: int | None = None
    decoder_position_embedding_type: str | None = None
    decoder_pre_norm: bool | None = None
    max_target_positions: int | None = None
    decoder_vocab_size: int | None = None
    share_encoder_decoder_embeddings: bool | None = None
    decoder_start_token_id: int | None = 2
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.scale_embedding is None:
            self.scale_embedding = self.position_embedding_type == "sinusoidal"
        if self.first_position is None:
            self.first_position = 0 if self.input_type == "values" else (self.pad_token_id or 0) + 1
        if self.initializer_range is None:  # before the check of `hidden_size`
            self.initializer_range = 0.02 if self.hidden_size >= 512 else (2 * max(self.hidden_size, 1)) ** -0.5
        for field in ("dynamic_projection_length", "contextual_projection"):
            if getattr(self, field) is None:
                setattr(self, field, not self.learns_causal_projection)
        super().__post_init__(**kwargs)

    @property
    def learns_causal_projection(self) -> bool:
        """A decoder without an encoder: P is a parameter of every layer (section 3.3)."""
        return self.is_decoder and not self.add_cross_attention

    @property
    def decoder_config(self) -> "LunaConfig":
        """The configuration of the decoder of an encoder-decoder."""
        config = super().decoder_config
        if self.num_decoder_attention_heads is not None and self.num_decoder_pack_attention_heads is None:
            config.num_pack_attention_heads = self.num_decoder_attention_heads
        return config

    @property
    def position_offset(self) -> int:
        """Row of the position table that the first token uses."""
        return cast(int, self.first_position)

    @property
    def longest_input(self) -> int | None:
        """The greatest number of positions of a text; None = no limit."""
        return self.max_position_embeddings if self.position_embedding_type == "learned" else None

    def validate_architecture(self) -> None:
        """Check the fields; `@strict` calls this after `__init__` and before saving."""
        self._check_fields()
        self._check_sides()
        if self.is_encoder_decoder:
            self.decoder_config._check_fields()
        if (self.is_decoder or self.is_encoder_decoder) and self.input_type != "tokens":
            raise ValueError(f"a decoder needs input_type='tokens', got {self.input_type!r}")
        if self.num_channels != 1 and self.input_type != "values":
            raise ValueError(f"num_channels={self.num_channels} requires input_type='values', got {self.input_type!r}")
        for field, off in (("embedding_size", self.hidden_size), ("type_vocab_size", 0)):
            if (value := getattr(self, field)) != off:
                if self.is_encoder_decoder or (self.is_decoder and field == "embedding_size"):
                    raise ValueError(f"a decoder does not support {field}, got {value}; omit it")
                if self.input_type != "tokens":
                    raise ValueError(f"{field}={value} requires input_type='tokens', got {self.input_type!r}")
        if self.learns_causal_projection:
            for field in ("dynamic_projection_length", "contextual_projection"):
                if getattr(self, field):
                    raise ValueError(
                        f"{field}=True requires an encoder, because P of a decoder without one is a parameter of every "
                        f"layer; omit {field}, or pass {field}=False for the folder of an encoder"
                    )

    def _check_fields(self) -> None:
        self._check_choices(_CHOICES)
        self._check_activations("hidden_act", "classifier_activation")
        sizes = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_pack_attention_heads",
            "intermediate_size", "projection_length", "max_position_embeddings", "classifier_hidden_size",
            "embedding_size", "num_channels",
        )  # fmt: skip
        self._check_counts(sizes)
        self._check_counts(["classifier_num_layers", "first_position", "type_vocab_size"], least=0)
        self._check_probabilities(
            "dropout", "attention_dropout", "activation_dropout", "layerdrop", "classifier_dropout", "word_dropout"
        )
        self._check_deviations("layer_norm_eps", "initializer_range")
        for field in ("num_attention_heads", "num_pack_attention_heads"):
            if self.hidden_size % getattr(self, field):
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) must be divisible by {field} ({getattr(self, field)})"
                )
        if self.position_embedding_type == "sinusoidal" and self.hidden_size < 4:
            raise ValueError(f"sinusoidal positions need a hidden_size of at least 4, got {self.hidden_size}")
        if self.pool_padding and self.pooling not in ("mean", "packed_mean"):
            raise ValueError(f"pool_padding applies to pooling 'mean' and 'packed_mean', not to {self.pooling!r}")
        if self.pool_padding and self.unpad_inputs and self.pooling == "mean":
            raise ValueError(
                "pool_padding=True reads states at padding, which unpad_inputs=True does not compute; set one to False"
            )


@strict
class LunaSeq2SeqConfig(LunaConfig):
    """Configuration of an encoder and a decoder, for `LunaForConditionalGeneration`; the fields are in `LunaConfig`.

    Example:
        >>> LunaSeq2SeqConfig(vocab_size=32000, num_decoder_layers=3).decoder_config.num_hidden_layers
        3
    """

    model_type = "luna_seq2seq"
    side_class = LunaConfig

    is_encoder_decoder: bool = True


LunaConfig.seq2seq_class = LunaSeq2SeqConfig

__all__ = ["LunaConfig", "LunaSeq2SeqConfig"]
