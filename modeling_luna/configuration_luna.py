# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the Luna models."""

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

_CHOICES = {
    "input_type": ("tokens", "values"),
    "position_embedding_type": ("learned", "sinusoidal", "none"),
    "pooling": ("cls", "mean", "packed_max", "packed_mean", "packed_attention"),
    "pair_features": ("concat", "interaction"),
}


@strict
class LunaConfig(PreTrainedConfig):
    """Configuration of a Luna model (Linear Unified Nested Attention, Ma et al. 2021).

    The defaults are those of `luna_base_tied_512`, RoBERTa-size with 132 M parameters.

    Args:
        vocab_size: number of tokens; not read when `input_type` is `"values"`.
        hidden_size: width d of the model.
        num_hidden_layers: number of layers N.
        num_attention_heads: heads of the unpack attention.
        num_pack_attention_heads: heads of the pack attention; None = `num_attention_heads`.
        intermediate_size: width of the feed-forward layers.
        projection_length: rows l of the packed sequence P.
        dynamic_projection_length: a sequence of n tokens uses min(n, `projection_length`) rows of P, as the original
            does by default; False = always all rows (`--fix-projection-length`).
        contextual_projection: P is updated from layer to layer (paper section 3.1); False = every layer has a learned P
            of its own (the ablation of Table 5).
        tie_key_value: one projection serves as key and value (section 4.2).
        hidden_act: activation of the feed-forward layers.
        dropout: probability on embeddings and on the outputs of attention and feed-forward layers.
        attention_dropout: probability on attention weights.
        activation_dropout: probability after `hidden_act`.
        layerdrop: probability of leaving out a whole layer in training.
        input_type: `"tokens"` (`input_ids`) or `"values"` (`input_values`, one real number a position).
        max_position_embeddings: longest sequence with learned positions.
        position_embedding_type: `"learned"`, `"sinusoidal"` (any length; P gets sinusoids as well) or `"none"`.
        scale_embedding: multiply embeddings and P by sqrt(d); None = with sinusoidal positions only, as the original.
        embedding_norm: LayerNorm on the embeddings and on P.
        pre_norm: LayerNorm before attention and feed-forward, and once at the end; False = after each (section 3.1).
        share_layers: all layers share one set of weights.
        layer_norm_eps: epsilon of every LayerNorm.
        initializer_range: standard deviation of the initial weights.
        pooling: what a sequence classifier reads: the first token (`"cls"`), the mean over tokens (`"mean"`), or the
            packed sequence by max-pooling, mean (Table 3) or attention from the first token (`"packed_max"`,
            `"packed_mean"`, `"packed_attention"`).
        pool_padding: a mean also counts padding, as the original's LRA code does; the result then depends on the batch.
        drop_first_token: sequence classification leaves out the first token (the pair classifier: of the first sequence
            only), as the 2021 LRA code does when it reads P.
        classifier_num_layers: hidden layers of the classification head.
        classifier_hidden_size: their width; None = `hidden_size`.
        classifier_activation: their activation.
        classifier_dropout: probability before each layer of the classification head.
        classifier_bias: the last layer of the classification head has a bias.
        pair_features: what the pair classifier reads of sequences a and b: `"concat"` [b, a] (the order of the 2021 LRA
            code) or `"interaction"` [a, b, a * b, a - b].
        pad_token_id: also fixes the first learned or sinusoidal position, `pad_token_id` + 1, as in fairseq.
        tie_word_embeddings: the masked-LM output weight is the embedding.
        sparse_prediction: under labels the masked-LM head projects the predicted positions alone, so that its cost and
            memory are those of M positions in place of B T; `logits` then are `[M, vocab_size]`.

    Raises:
        ValueError: the fields do not fit together; the message has the numbers.

    Example:
        >>> LunaConfig.base_512(tied=False).tie_key_value
        False
    """

    model_type = "luna"
    attribute_map = {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers"}

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_pack_attention_heads: int | None = None
    intermediate_size: int = 3072
    projection_length: int = 128
    dynamic_projection_length: bool = True
    contextual_projection: bool = True
    tie_key_value: bool = True
    hidden_act: str = "gelu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.0
    layerdrop: float | int = 0.0
    input_type: str = "tokens"
    max_position_embeddings: int = 512
    position_embedding_type: str = "learned"
    scale_embedding: bool | None = None
    embedding_norm: bool = True
    pre_norm: bool = False
    share_layers: bool = False
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    pooling: str = "cls"
    pool_padding: bool = False
    drop_first_token: bool = False
    classifier_num_layers: int = 1
    classifier_hidden_size: int | None = None
    classifier_activation: str = "tanh"
    classifier_dropout: float | int = 0.0
    classifier_bias: bool = True
    pair_features: str = "concat"
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    sparse_prediction: bool = False

    def __post_init__(self, **kwargs):
        if self.num_pack_attention_heads is None:
            self.num_pack_attention_heads = self.num_attention_heads
        if self.classifier_hidden_size is None:
            self.classifier_hidden_size = self.hidden_size
        if self.scale_embedding is None:
            self.scale_embedding = self.position_embedding_type == "sinusoidal"
        super().__post_init__(**kwargs)

    @property
    def position_offset(self) -> int:
        """Row of the position table that the first token uses: `pad_token_id` + 1 for tokens, 0 for real values."""
        return 0 if self.input_type == "values" else self.pad_token_id + 1

    def validate_architecture(self):
        """Part of the `@strict` contract: runs after `__init__` and before saving."""
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {', '.join(choices)}, got {getattr(self, field)!r}")
        for field in ("hidden_act", "classifier_activation"):
            if getattr(self, field) not in ACT2FN:
                raise ValueError(f"{field} is {getattr(self, field)!r}, which transformers' ACT2FN does not have")
        for field in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_pack_attention_heads",
            "intermediate_size", "projection_length", "max_position_embeddings", "classifier_hidden_size",
        ):  # fmt: skip
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.classifier_num_layers < 0:
            raise ValueError(f"classifier_num_layers must be at least 0, got {self.classifier_num_layers}")
        for field in ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "classifier_dropout"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field} must be in [0, 1), got {getattr(self, field)}")
        for field in ("num_attention_heads", "num_pack_attention_heads"):
            if self.hidden_size % getattr(self, field):
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) must be divisible by {field} ({getattr(self, field)})"
                )
        if self.position_embedding_type == "sinusoidal" and self.hidden_size < 4:
            raise ValueError(f"sinusoidal positions need a hidden_size of at least 4, got {self.hidden_size}")
        if self.input_type == "tokens" and (self.pad_token_id is None or not 0 <= self.pad_token_id < self.vocab_size):
            raise ValueError(
                f"pad_token_id ({self.pad_token_id}) must be a token of the vocabulary (0 to {self.vocab_size - 1}): "
                "it marks padding and fixes the first position"
            )
        if self.pool_padding and self.pooling not in ("mean", "packed_mean"):
            raise ValueError(f"pool_padding applies to pooling 'mean' and 'packed_mean', not to {self.pooling!r}")

    @classmethod
    def base_512(cls, tied: bool = True, **overrides) -> "LunaConfig":
        """`luna_base_tied_512` (132 M parameters) or, with `tied=False`, `luna_base_untied_512` (146 M)."""
        return cls(**{"tie_key_value": tied} | overrides)

    @classmethod
    def base_2048(cls, tied: bool = True, **overrides) -> "LunaConfig":
        """`luna_base_2048`: l = 256, 2048 positions, 133 M parameters."""
        return cls.base_512(tied, **{"max_position_embeddings": 2048, "projection_length": 256} | overrides)

    @classmethod
    def large_512(cls, tied: bool = True, **overrides) -> "LunaConfig":
        """`luna_large_512`: 24 layers, d = 1024, 381 M parameters."""
        large = {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        }  # fmt: skip
        return cls.base_512(tied, **large | overrides)

    @classmethod
    def large_2048(cls, tied: bool = True, **overrides) -> "LunaConfig":
        """`luna_large_2048`: l = 256. The original has 512 positions in spite of its name, and so has this."""
        return cls.large_512(tied, **{"projection_length": 256} | overrides)

    @classmethod
    def _lra(cls, vocab_size, projection_length, width, overrides, **fields):
        """Long Range Arena as the 2021 code builds it (paper Table 1): untied, classifier [Linear + ReLU] + Linear."""
        fields |= {
            "vocab_size": vocab_size, "projection_length": projection_length, "hidden_size": width,
            "tie_key_value": False, "classifier_activation": "relu", "classifier_bias": False,
        }  # fmt: skip
        return cls(**fields | overrides)

    @classmethod
    def lra_listops(cls, vocab_size: int, projection_length: int = 16, **overrides) -> "LunaConfig":
        """`luna_lra_listop`: six applications of one shared layer (the README passes `--encoder-layers 1`)."""
        return cls._lra(
            vocab_size, projection_length, 512, overrides, num_hidden_layers=6, share_layers=True,
            num_attention_heads=8, intermediate_size=2048, max_position_embeddings=2001, classifier_hidden_size=2048,
            num_labels=10,
        )  # fmt: skip

    @classmethod
    def lra_text(cls, vocab_size: int, projection_length: int = 16, **overrides) -> "LunaConfig":
        """`luna_lra_imdb`, byte-level text classification."""
        return cls._lra(
            vocab_size, projection_length, 256, overrides, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=1024, max_position_embeddings=4002, classifier_hidden_size=1024,
        )  # fmt: skip

    @classmethod
    def lra_retrieval(cls, vocab_size: int, projection_length: int = 16, **overrides) -> "LunaConfig":
        """`luna_lra_aan`, for `LunaForSequencePairClassification`."""
        return cls._lra(
            vocab_size, projection_length, 128, overrides, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=4002, classifier_hidden_size=512,
        )  # fmt: skip

    @classmethod
    def lra_image(cls, vocab_size: int, projection_length: int = 16, **overrides) -> "LunaConfig":
        """`luna_lra_cifar10`: grey pixels as tokens."""
        return cls._lra(
            vocab_size, projection_length, 64, overrides, num_hidden_layers=1, num_attention_heads=8,
            intermediate_size=128, max_position_embeddings=1024, classifier_hidden_size=128, num_labels=10,
        )  # fmt: skip

    @classmethod
    def lra_pathfinder(cls, vocab_size: int, projection_length: int = 16, **overrides) -> "LunaConfig":
        """`luna_lra_pf32`: 32 x 32 pixels as tokens, mean pooling."""
        return cls._lra(
            vocab_size, projection_length, 128, overrides, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=1026, classifier_hidden_size=256, pooling="mean",
        )  # fmt: skip

    @classmethod
    def lra_pathfinder128(cls, vocab_size: int, projection_length: int = 16, **overrides) -> "LunaConfig":
        """`luna_lra_pf128`: as `lra_pathfinder` for 128 x 128 pixels."""
        return cls.lra_pathfinder(vocab_size, projection_length, **{"max_position_embeddings": 16386} | overrides)


__all__ = ["LunaConfig"]
