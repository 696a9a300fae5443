"""Configuration of the Mega models."""

from typing import Any, Self

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from luna_mega.modeling_common.configuration import ABSENT_FIELDS, MOST_IN_CHUNK, SharedConfig, strict
from luna_mega.modeling_mega.adaptive import check_bands
from luna_mega.modeling_mega.presets_mega import MegaPresets

logger = logging.get_logger(__name__)

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "input_type": ("tokens", "values", "patches"),
    "attention_activation": ("softmax", "laplace", "relu2"),
    "normalization_type": ("layernorm", "scalenorm", "rmsnorm", "batchnorm", "syncbatchnorm"),
    "relative_positional_bias": ("rotary", "simple", "t5", "alibi", "rope", "none"),
    "pooling": ("cls", "last", "mean"),
    "pair_features": ("concat", "interaction"),
}
# Field of the decoder of an encoder-decoder -> field that applies if it is None.
DECODER_FIELDS = {
    "num_decoder_layers": "num_hidden_layers",
    "decoder_intermediate_size": "intermediate_size",
    "decoder_nffn_hidden_size": "nffn_hidden_size",
    "decoder_shared_representation_size": "shared_representation_size",
    "decoder_ema_projection_size": "ema_projection_size",
    "decoder_vocab_size": "vocab_size",
    "decoder_max_positions": "max_positions",
}


@strict
class MegaConfig(MegaPresets, SharedConfig, PreTrainedConfig):
    """Configuration of a Mega model (Moving Average Equipped Gated Attention, Ma et al. 2022).

    By default attention covers all positions, so that time, memory and cache grow with the length, quadratic time
    included. For long inputs, set chunks, for which they are linear and the cache constant: `use_chunking=True,
    chunk_size=128`.

    The first group of fields has the names and defaults of the Mega of transformers v4, so that its folders load. The
    second group is for the models of the paper, the third for encoder-decoders.

    Args:
        vocab_size: Number of tokens. Not used if `input_type` is `"values"`.
        hidden_size: Width d of the model.
        num_hidden_layers: Number of Mega blocks.
        intermediate_size: Width v of the values.
        ema_projection_size: Dimensions h of the moving average, for every channel. 0 = no moving average (Figure 4):
            attention and gates read the input of the layer, and `bidirectional` has no effect.
        bidirectional: The moving average runs in both directions. None = unless `is_decoder`, which requires False.
        shared_representation_size: Width z of queries and keys.
        use_chunking: Attention within chunks of `chunk_size` positions (Mega-chunk, section 3.5), for any length.
        chunk_size: Positions of a chunk. With `relative_positional_bias="simple"` it fixes the size of the bias table.
        truncation: Longest lag of the moving average in the parallel form. None or less than 1 = no limit.
        normalize_before_mega, normalize_before_ffn: Norm before the sub-layer instead of after its residual.
        normalization_type: `"layernorm"`, `"scalenorm"`, `"rmsnorm"`, `"batchnorm"` or `"syncbatchnorm"`.
        norm_affine: Norms have learned parameters.
        activation: Activation of values, candidate and feed-forward layer (SiLU in the paper).
        attention_activation: `"softmax"`, `"laplace"` (section 3.2) or `"relu2"`.
        dropout_prob: Dropout of embeddings, of the moving average and of the outputs of both sub-layers.
        hidden_dropout_prob, attention_probs_dropout_prob: Dropout of values and of attention weights.
        use_feature_dropout: `dropout_prob` and `hidden_dropout_prob` drop channels at all positions of a sequence.
        use_normalized_ffn: Blocks have a feed-forward layer of width `nffn_hidden_size`, with dropout of
            `nffn_activation_dropout_prob` after its activation.
        max_positions: Longest sequence with `relative_positional_bias="simple"` and no chunks.
        add_token_type_embeddings, type_vocab_size: Embeddings of token types.
        initializer_range: Standard deviation of linear and embedding weights.
        ema_delta_alpha_range, ema_beta_range, ema_gamma_omega_range: Standard deviations of the moving average.
        relative_positional_bias: `"simple"` (a table), for any length `"rotary"`, `"t5"` (ranges of distances) and
            `"alibi"` (linear in the distance), or `"none"`. `"rope"` is not a bias: it rotates queries and keys of
            self-attention, so that their products depend on the distance. TUPE, which section 3.2 also mentions, adds
            products of absolute positions, which Mega does not have.
        classifier_dropout: Dropout before each layer of the classification head. None = `hidden_dropout_prob`.
        add_lm_hidden_dense_layer: The language-model heads have a dense layer with tanh.
        num_attention_heads: Always 1. The field exists in files of transformers v4.
        pad_token_id: Without an `attention_mask` these tokens are padding. None = no token is. It can be changed at
            any time, also in a model.
        is_decoder: Causal attention, for `MegaForCausalLM`.
        add_cross_attention: A decoder attends to `encoder_hidden_states`. Requires `is_decoder=True`.

        input_type: `"tokens"` (`input_ids`), `"values"` (`input_values`, real numbers, such as pixels or audio) or
            `"patches"` (`pixel_values`, images).
        image_size, patch_size: Height and width of images and of their patches.
        num_channels: Channels of images (default 3) or of `"values"` (default 1, `input_values` `[B, T]`; with C > 1
            they are `[B, T, C]`).
        use_absolute_position_embeddings: Patches have learned position embeddings.
        output_projection: A linear layer and SiLU at every position, after the last norm.
        drop_path_rate: Stochastic depth: probability with which a sequence skips a sub-layer of the last block. It
            increases linearly from 0 in the first block.
        scale_embedding: Multiply embeddings by sqrt(d).
        embedding_size: Size of word embeddings, which a linear layer projects to `hidden_size`. None = `hidden_size`.
        embedding_norm: A norm after the embeddings.
        final_norm, final_norm_affine: A norm after the last block; it has parameters.
        ema_shift: The backward moving average starts at the next token (checkpoints of fairseq's `flash` branch).
        padded_batch_statistics: Batch norm includes padding, with embeddings of 0, as in the original. The original
            also pads the last chunk: pad to a multiple of `chunk_size` for equal statistics.
        legacy_rms_norm: `"rmsnorm"` only multiplies by its weight, as the Mega of transformers v4 does.
        legacy_bias_table: A `"simple"` table has `2 * max_positions - 1` entries and its center at `chunk_size - 1`,
            as in transformers v4 if `chunk_size` is not negative.
        pooling: Input of sequence classifiers: the first token (`"cls"`), the last token (`"last"`) or the mean
            (`"mean"`). With `is_decoder=True` the last token or the mean.
        classifier_num_layers, classifier_hidden_size, classifier_activation, classifier_bias: Classification head.
        pair_features: `"concat"` [b, a] or `"interaction"` [a, b, a * b, a - b] of the sequences a and b of a pair.
        lm_head_bias: The output layer of `MegaForCausalLM` has a bias.
        adaptive_input_cutoffs: First tokens of the second and later bands of an adaptive input embedding. None =
            an ordinary embedding. The size of embeddings decreases by `adaptive_input_factor` from band to band.
        adaptive_softmax_cutoffs, adaptive_softmax_factor: The same for an adaptive softmax of `MegaForCausalLM`, which
            returns log-probabilities. `adaptive_softmax_dropout` applies to its inputs and within its tails.
        tie_adaptive_projections: An adaptive softmax with tied embeddings also uses the projections of the input.
        legacy_adaptive_loss: The loss ignores one token of every tail, as the original does by mistake.
        sparse_prediction: In training, the masked-LM head projects only the M predicted positions, and `logits` are
            `[M, vocab_size]`.
        unpad_inputs: Layers skip padding. States at padding are 0. No effect if states or weights are returned, with a
            cache, and in compiled or exported programs.

        is_encoder_decoder: True only in `MegaSeq2SeqConfig`. The fields above then describe the encoder, and the
            decoder if its field is None.
        num_decoder_layers, decoder_intermediate_size, decoder_nffn_hidden_size, decoder_vocab_size: Decoder sizes.
        decoder_shared_representation_size, decoder_ema_projection_size, decoder_max_positions: Decoder sizes.
        decoder_chunk_size: Attention chunks of the decoder. Less than 1 = attention over the entire sequence.
        cross_attention_positions: Longest source or target of a `"simple"` bias in cross-attention. None = the maximum
            of `max_positions` and `decoder_max_positions`.
        share_encoder_decoder_embeddings: Source and target share an embedding. None = if `tie_word_embeddings` and the
            vocabularies are equal. With `tie_word_embeddings` the output layer is the embedding of the decoder.
        decoder_start_token_id: First token of targets; fairseq uses `</s>`.

    Raises:
        ValueError: Invalid values or combinations of fields.
    """

    model_type = "mega"
    default_fields = {
        "classifier_hidden_size": "hidden_size", "embedding_size": "hidden_size",
        "classifier_dropout": "hidden_dropout_prob",
    }  # fmt: skip
    decoder_fields = DECODER_FIELDS
    absent_fields = ABSENT_FIELDS | {
        "layer_norm_eps": (1e-5, "omit it, because the epsilon of the norms is always 1e-5"),
        "position_embedding_type": (None, "use `relative_positional_bias`"),
    }
    zero_fields = frozenset({"ema_projection_size", "decoder_ema_projection_size"})
    input_fields = {
        "image_size": ("patches",), "patch_size": ("patches",), "use_absolute_position_embeddings": ("patches",),
        "num_channels": ("values", "patches"), "adaptive_input_cutoffs": ("tokens",),
    }  # fmt: skip
    attribute_map = {
        "d_model": "hidden_size", "max_position_embeddings": "max_positions", "hidden_act": "activation",
        "dropout": "dropout_prob", "attention_dropout": "attention_probs_dropout_prob",
    }  # fmt: skip
    base_model_fsdp_plan = {"embedding_layer.word_embeddings": "free_full_weight", "layers.*": "free_full_weight"}

    vocab_size: int = 30522
    hidden_size: int = 128
    num_hidden_layers: int = 4
    intermediate_size: int = 256
    ema_projection_size: int = 16
    bidirectional: bool | None = None
    shared_representation_size: int = 64
    use_chunking: bool = False
    chunk_size: int = -1
    truncation: int | None = None
    normalize_before_mega: bool = True
    normalization_type: str = "scalenorm"
    norm_affine: bool = True
    activation: str = "silu"
    attention_activation: str = "softmax"
    dropout_prob: float | int = 0.1
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    use_feature_dropout: bool = False
    use_normalized_ffn: bool = True
    nffn_hidden_size: int = 256
    normalize_before_ffn: bool = True
    nffn_activation_dropout_prob: float | int = 0.1
    max_positions: int = 2048
    add_token_type_embeddings: bool = False
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    ema_delta_alpha_range: float = 0.2
    ema_beta_range: float = 0.02
    ema_gamma_omega_range: float = 1.0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    relative_positional_bias: str = "rotary"
    classifier_dropout: float | int | None = None
    use_cache: bool = True
    add_lm_hidden_dense_layer: bool = True
    num_attention_heads: int = 1
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    input_type: str = "tokens"
    image_size: int = 224
    patch_size: int = 16
    num_channels: int | None = None
    use_absolute_position_embeddings: bool = True
    output_projection: bool = False
    drop_path_rate: float | int = 0.0
    scale_embedding: bool = False
    embedding_size: int | None = None
    embedding_norm: bool = False
    final_norm: bool = False
    final_norm_affine: bool = True
    ema_shift: bool = False
    padded_batch_statistics: bool = False
    legacy_rms_norm: bool = False
    legacy_bias_table: bool = False
    pooling: str = "cls"
    classifier_num_layers: int = 1
    classifier_hidden_size: int | None = None
    classifier_activation: str = "tanh"
    classifier_bias: bool = True
    pair_features: str = "concat"
    lm_head_bias: bool = True
    adaptive_input_cutoffs: list[int] | None = None
    adaptive_input_factor: float | int = 4
    adaptive_softmax_cutoffs: list[int] | None = None
    adaptive_softmax_factor: float | int = 4
    adaptive_softmax_dropout: float | int = 0.0
    tie_adaptive_projections: bool = False
    legacy_adaptive_loss: bool = False
    sparse_prediction: bool = False
    unpad_inputs: bool = False

    is_encoder_decoder: bool = False
    num_decoder_layers: int | None = None
    decoder_intermediate_size: int | None = None
    decoder_nffn_hidden_size: int | None = None
    decoder_shared_representation_size: int | None = None
    decoder_ema_projection_size: int | None = None
    decoder_vocab_size: int | None = None
    decoder_chunk_size: int | None = None
    decoder_max_positions: int | None = None
    cross_attention_positions: int | None = None
    share_encoder_decoder_embeddings: bool | None = None
    decoder_start_token_id: int | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        if self.bidirectional is None:
            self.bidirectional = not self.is_decoder
        if self.truncation is not None and self.truncation < 1:
            self.truncation = None
        if self.num_channels is None:
            self.num_channels = {"patches": 3, "values": 1}.get(self.input_type)
        super().__post_init__(**kwargs)
        if self.chunk_size > 0 and not self.use_chunking and not self.legacy_bias_table:
            logger.warning_once(
                f"chunk_size={self.chunk_size} has no effect without use_chunking=True: attention covers all "
                "positions, and time grows with the square of the length; pass use_chunking=True, or omit chunk_size"
            )
        if self.type_vocab_size != MegaConfig.type_vocab_size and not self.add_token_type_embeddings:
            logger.warning_once(
                f"type_vocab_size={self.type_vocab_size} has no effect without add_token_type_embeddings=True; pass "
                "it, or omit type_vocab_size"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Return a configuration, with legacy fields if it was saved by transformers v4."""
        # Versions before 0.5 saved num_channels=3 for all inputs, and had one channel of values.
        kind, channels = config_dict.get("input_type", "tokens"), config_dict.get("num_channels")
        if kind == "values":
            legacy = None if channels == 3 else channels
            config_dict = config_dict | {"num_channels": config_dict.get("value_channels", legacy)}
            config_dict.pop("value_channels", None)  # `to_dict` writes it
        elif kind == "tokens" and channels == 3:
            config_dict = config_dict | {"num_channels": None}
        if str(config_dict.get("transformers_version", "")).startswith("4."):
            config_dict = {
                "legacy_rms_norm": config_dict.get("normalization_type") == "rmsnorm",
                "legacy_bias_table": config_dict.get("relative_positional_bias") == "simple"
                and config_dict.get("chunk_size", -1) >= 0,
            } | config_dict
        # The base class validates before it sets keyword arguments.
        directions = {name: kwargs[name] for name in ("is_decoder", "bidirectional") if name in kwargs}
        return super().from_dict(config_dict | directions, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with `value_channels` for several channels of values (see `from_dict`)."""
        content: dict[str, Any] = super().to_dict()
        if self.input_type == "values" and self.num_channels != 1:
            content["value_channels"] = self.num_channels
        return content

    @property
    def attention_chunk(self) -> int | None:
        """Return the positions of an attention chunk, or None for attention over the entire sequence."""
        return self.chunk_size if self.use_chunking else None

    @property
    def longest_input(self) -> int | None:
        """The greatest number of positions of a text, for a `"simple"` bias without chunks; None = no limit."""
        return self.max_positions if self.relative_positional_bias == "simple" and not self.use_chunking else None

    @property
    def bias_positions(self) -> int:
        """Return M of a `"simple"` table with 2 M - 1 entries."""
        return self.chunk_size if self.use_chunking and not self.legacy_bias_table else self.max_positions

    @property
    def cross_positions(self) -> int:
        """Return M of a `"simple"` table in cross-attention."""
        return self.cross_attention_positions or max(self.max_positions, self.decoder_max_positions or 0)

    @property
    def decoder_config(self) -> "MegaConfig":
        """Return the configuration of the decoder of an encoder-decoder."""
        config: MegaConfig = super().decoder_config
        if self.decoder_chunk_size is not None:
            config.chunk_size = self.decoder_chunk_size
            config.use_chunking = self.decoder_chunk_size > 0
        config.cross_attention_positions = self.cross_positions
        config.bidirectional = config.ema_shift = False
        if config.ema_projection_size == 0:
            config.truncation = None  # of the encoder
        return config

    def validate_architecture(self) -> None:
        """Raise `ValueError` for invalid fields; `@strict` calls this after `__init__` and before saving."""
        self._check_choices(_CHOICES)
        self._check_activations("activation", "classifier_activation")
        sizes = (
            "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "ema_projection_size",
            "shared_representation_size", "nffn_hidden_size", "max_positions", "type_vocab_size",
            "classifier_hidden_size", "embedding_size", "cross_attention_positions", "image_size", "patch_size",
            "num_channels", "truncation",
        )  # fmt: skip
        self._check_counts(sizes)
        self._check_counts(["classifier_num_layers"], least=0)
        self._check_probabilities(
            "dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob",
            "classifier_dropout", "adaptive_softmax_dropout", "drop_path_rate",
        )  # fmt: skip
        self._check_deviations("initializer_range", "ema_delta_alpha_range", "ema_beta_range", "ema_gamma_omega_range")
        if self.use_chunking and self.chunk_size < 1:
            raise ValueError(f"use_chunking needs a chunk_size of at least 1, got {self.chunk_size}")
        if self.use_chunking:
            self._check_counts(["chunk_size"], most=MOST_IN_CHUNK)
        kind, width = self.relative_positional_bias, self.shared_representation_size
        if kind in ("rotary", "rope") and width % 2:
            raise ValueError(
                f"relative_positional_bias={kind!r} requires an even `shared_representation_size`, got {width}"
            )
        if self.num_attention_heads != 1:
            raise ValueError(f"`num_attention_heads` must be 1 for Mega, got {self.num_attention_heads}; omit it")
        if self.is_decoder and self.bidirectional:
            raise ValueError("is_decoder=True requires bidirectional=False, got bidirectional=True")
        if self.ema_shift and not self.bidirectional:
            raise ValueError("ema_shift=True requires bidirectional=True, got bidirectional=False")
        if self.ema_projection_size == 0:
            for field, value in (("truncation", self.truncation), ("ema_shift", self.ema_shift or None)):
                if value is not None:
                    raise ValueError(f"ema_projection_size=0 has no moving average; omit {field}={value}")
        if self.padded_batch_statistics and self.unpad_inputs:
            raise ValueError("padded_batch_statistics=True requires unpad_inputs=False, got unpad_inputs=True")
        check_bands(self)
        self._check_input_fields()
        if self.input_type != "tokens" and self.embedding_size != self.hidden_size:
            raise ValueError(
                f"embedding_size={self.embedding_size} requires input_type='tokens', got {self.input_type!r}; omit it"
            )
        if self.input_type == "patches":
            self._check_patches()
        self._check_sides()
        if self.is_encoder_decoder:
            self._check_encoder()
            self.decoder_config.validate_architecture()

    def _check_patches(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        patches = (self.image_size // self.patch_size) ** 2
        if self.relative_positional_bias == "simple" and not self.use_chunking and self.max_positions != patches:
            raise ValueError(f"`max_positions` must be {patches}, the number of patches, got {self.max_positions}")
        if self.is_decoder:
            raise ValueError("input_type='patches' requires an encoder; omit is_decoder=True")
        if self.unpad_inputs:
            raise ValueError("input_type='patches' has no padding to remove; omit unpad_inputs=True")

    def _check_encoder(self) -> None:
        if self.input_type != "tokens" or self.adaptive_input_cutoffs or self.adaptive_softmax_cutoffs:
            raise ValueError(
                "is_encoder_decoder=True needs input_type='tokens' and no adaptive vocabulary, got "
                f"input_type={self.input_type!r}, adaptive_input_cutoffs={self.adaptive_input_cutoffs} and "
                f"adaptive_softmax_cutoffs={self.adaptive_softmax_cutoffs}"
            )
        if self.embedding_size != (width := self.hidden_size):
            raise ValueError(
                f"is_encoder_decoder=True needs embedding_size={width}, the `hidden_size`, got {self.embedding_size}"
            )


@strict
class MegaSeq2SeqConfig(MegaConfig):
    """Configuration of `MegaForConditionalGeneration`, an encoder and a decoder with the fields of `MegaConfig`."""

    model_type = "mega_seq2seq"
    side_class = MegaConfig

    is_encoder_decoder: bool = True


def check_tied_widths(config: MegaConfig) -> None:
    """Raise `ValueError` for an output layer that is tied to word embeddings of another size, or of several sizes."""
    if config.tie_word_embeddings and config.adaptive_input_cutoffs is not None:
        raise ValueError(
            "tie_word_embeddings=True needs one matrix of word embeddings, got adaptive_input_cutoffs="
            f"{config.adaptive_input_cutoffs}; pass tie_word_embeddings=False"
        )
    if config.tie_word_embeddings and config.embedding_size != config.hidden_size:
        raise ValueError(
            f"tie_word_embeddings=True needs embedding_size={config.hidden_size}, the `hidden_size`, got "
            f"{config.embedding_size}; or pass tie_word_embeddings=False"
        )


MegaConfig.seq2seq_class = MegaSeq2SeqConfig

__all__ = ["MegaConfig", "MegaSeq2SeqConfig"]
