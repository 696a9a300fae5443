"""Published sizes and recipes of Luna as class methods of `LunaConfig`; keyword arguments override a recipe."""

from typing import Any, Self

# Standard deviation in the original code for models that it initializes as BERT.
BERT_RANGE = 0.02


def xavier_range(width: int) -> float:
    """Return the deviation of the original's projections: Xavier initialization with gain 1 / sqrt(2)."""
    return float((2 * width) ** -0.5)


class LunaPresets:
    """Base of `LunaConfig` with its presets."""

    @classmethod
    def base_512(cls, tied: bool = True, **overrides: Any) -> Self:
        """`luna_base_tied_512` (132 M parameters) or, with `tied=False`, `luna_base_untied_512` (146 M)."""
        return cls(**{"tie_key_value": tied, "initializer_range": BERT_RANGE} | overrides)

    @classmethod
    def base_2048(cls, tied: bool = True, **overrides: Any) -> Self:
        """`luna_base_2048`: l = 256, 2048 positions, 133 M parameters."""
        return cls.base_512(tied, **{"max_position_embeddings": 2048, "projection_length": 256} | overrides)

    @classmethod
    def large_512(cls, tied: bool = True, **overrides: Any) -> Self:
        """`luna_large_512`: 24 layers, d = 1024, 381 M parameters."""
        large = {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        }  # fmt: skip
        return cls.base_512(tied, **large | overrides)

    @classmethod
    def large_2048(cls, tied: bool = True, **overrides: Any) -> Self:
        """`luna_large_2048`: l = 256. It has 512 positions in spite of its name, as in the original."""
        return cls.large_512(tied, **{"projection_length": 256} | overrides)

    @classmethod
    def _lra(
        cls, vocab_size: int, projection_length: int, width: int, overrides: dict[str, Any], **fields: Any
    ) -> Self:
        """Return a model of Long Range Arena in the 2021 code (paper Table 1).

        Keys and values are untied, and the classifier is [Linear + ReLU] + Linear.
        """
        fields |= {
            "vocab_size": vocab_size, "projection_length": projection_length, "hidden_size": width,
            "tie_key_value": False, "classifier_activation": "relu", "classifier_bias": False,
        }  # fmt: skip
        return cls(**{"initializer_range": xavier_range(width)} | fields | overrides)

    @classmethod
    def lra_listops(cls, vocab_size: int, projection_length: int = 16, **overrides: Any) -> Self:
        """`luna_lra_listop`: six applications of one shared layer (the README passes `--encoder-layers 1`)."""
        return cls._lra(
            vocab_size, projection_length, 512, overrides, num_hidden_layers=6, share_layers=True,
            num_attention_heads=8, intermediate_size=2048, max_position_embeddings=2001, classifier_hidden_size=2048,
            num_labels=10, initializer_range=BERT_RANGE,
        )  # fmt: skip

    @classmethod
    def lra_text(cls, vocab_size: int, projection_length: int = 16, **overrides: Any) -> Self:
        """`luna_lra_imdb`, byte-level text classification."""
        return cls._lra(
            vocab_size, projection_length, 256, overrides, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=1024, max_position_embeddings=4002, classifier_hidden_size=1024,
            initializer_range=BERT_RANGE,
        )  # fmt: skip

    @classmethod
    def lra_retrieval(cls, vocab_size: int, projection_length: int = 16, **overrides: Any) -> Self:
        """`luna_lra_aan`, for `LunaForSequencePairClassification`."""
        return cls._lra(
            vocab_size, projection_length, 128, overrides, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=4002, classifier_hidden_size=512,
        )  # fmt: skip

    @classmethod
    def lra_image(cls, vocab_size: int, projection_length: int = 16, **overrides: Any) -> Self:
        """`luna_lra_cifar10`: gray pixels as tokens."""
        return cls._lra(
            vocab_size, projection_length, 64, overrides, num_hidden_layers=1, num_attention_heads=8,
            intermediate_size=128, max_position_embeddings=1024, classifier_hidden_size=128, num_labels=10,
        )  # fmt: skip

    @classmethod
    def lra_pathfinder(cls, vocab_size: int, projection_length: int = 16, **overrides: Any) -> Self:
        """`luna_lra_pf32`: 32 x 32 pixels as tokens, mean pooling."""
        return cls._lra(
            vocab_size, projection_length, 128, overrides, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=1026, classifier_hidden_size=256, pooling="mean",
        )  # fmt: skip

    @classmethod
    def lra_pathfinder128(cls, vocab_size: int, projection_length: int = 16, **overrides: Any) -> Self:
        """`luna_lra_pf128`: as `lra_pathfinder` for 128 x 128 pixels."""
        return cls.lra_pathfinder(vocab_size, projection_length, **{"max_position_embeddings": 16386} | overrides)

    @classmethod
    def wmt(cls, vocab_size: int, projection_length: int = 32, tied: bool = True, **overrides: Any) -> Any:
        """`luna_base_tied` or, with `tied=False`, `luna_base_untied`: translation (Table 2), a `LunaSeq2SeqConfig`.

        Encoder and decoder have six layers each, and one vocabulary and embedding for both languages: 69.6 or 77.5 M
        parameters with 40,480 tokens.
        """
        fields = {
            "vocab_size": vocab_size, "projection_length": projection_length, "tie_key_value": tied,
            "is_encoder_decoder": True, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6,
            "num_attention_heads": 8, "hidden_act": "relu", "activation_dropout": 0.1, "embedding_norm": False,
            "position_embedding_type": "sinusoidal", "max_position_embeddings": 1024,
            "initializer_range": xavier_range(512),
        }  # fmt: skip
        config_class: Any = cls
        return config_class.with_encoder()(**fields | overrides)
