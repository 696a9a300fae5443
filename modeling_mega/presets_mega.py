"""Published sizes and recipes of Mega as class methods of `MegaConfig`. Keyword arguments override a recipe."""

from typing import Any, Self


class MegaPresets:
    """Base class of `MegaConfig` with its presets."""

    @classmethod
    def _lra(cls, width: int, values: int, overrides: dict[str, Any], **fields: Any) -> Self:
        """Return a model of Long Range Arena or raw speech, with a simple bias and mean pooling."""
        fields |= {
            "hidden_size": width, "intermediate_size": values, "nffn_hidden_size": values,
            "relative_positional_bias": "simple", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            "nffn_activation_dropout_prob": 0.0, "pooling": "mean", "classifier_hidden_size": values,
            "classifier_activation": "gelu", "classifier_bias": False, "initializer_range": 0.02,
        }  # fmt: skip
        return cls(**fields | overrides)

    @classmethod
    def _lra_tokens(cls, vocab_size: int, width: int, values: int, overrides: dict[str, Any], **fields: Any) -> Self:
        """Return a model of LRA for tokens, with norms after the residual and softmax attention."""
        fields |= {
            "vocab_size": vocab_size, "shared_representation_size": 64, "truncation": 1024, "dropout_prob": 0.1,
            "classifier_dropout": 0.1, "normalize_before_mega": False, "normalize_before_ffn": False,
        }  # fmt: skip
        return cls._lra(width, values, overrides, **fields)

    @classmethod
    def _lra_values(cls, width: int, values: int, overrides: dict[str, Any], **fields: Any) -> Self:
        """Return a model for real numbers, with batch norm before the layers, Laplace attention and no dropout."""
        fields = {
            "input_type": "values", "normalization_type": "batchnorm", "final_norm": True,
            "attention_activation": "laplace", "dropout_prob": 0.0, "classifier_dropout": 0.0,
        } | fields  # fmt: skip
        return cls._lra(width, values, overrides, **fields)

    @classmethod
    def lra_listops(cls, vocab_size: int, **overrides: Any) -> Self:
        """`mega_lra_listop` with layer norm and softmax.

        Mega-chunk is `use_chunking=True, chunk_size=128` in all LRA presets except `lra_pathfinder128`.
        """
        return cls._lra_tokens(
            vocab_size, 80, 160, overrides, num_hidden_layers=6, normalization_type="layernorm", max_positions=2002,
            num_labels=10,
        )  # fmt: skip

    @classmethod
    def lra_text(cls, vocab_size: int, **overrides: Any) -> Self:
        """`mega_lra_imdb`, byte-level text classification."""
        return cls._lra_tokens(vocab_size, 128, 256, overrides, num_hidden_layers=4, max_positions=4002)

    @classmethod
    def lra_retrieval(cls, vocab_size: int, **overrides: Any) -> Self:
        """`mega_lra_aan`, for `MegaForSequencePairClassification`."""
        return cls.lra_text(vocab_size, **{"num_hidden_layers": 6} | overrides)

    @classmethod
    def lra_image(cls, **overrides: Any) -> Self:
        """`mega_lra_cifar10`: 32 x 32 gray pixels."""
        return cls._lra_values(
            160, 320, overrides, num_hidden_layers=8, shared_representation_size=96, truncation=1024,
            max_positions=1024, num_labels=10,
        )  # fmt: skip

    @classmethod
    def lra_pathfinder(cls, **overrides: Any) -> Self:
        """`mega_lra_pf32`: 32 x 32 pixels."""
        return cls._lra_values(128, 256, overrides, num_hidden_layers=6, truncation=1024, max_positions=1024)

    @classmethod
    def lra_pathfinder128(cls, **overrides: Any) -> Self:
        """`mega_lra_pf128` (Path-X), 128 x 128 pixels. Mega-chunk: `use_chunking=True, chunk_size=4096`."""
        return cls._lra_values(
            64, 128, overrides, num_hidden_layers=4, shared_representation_size=32, truncation=4096,
            max_positions=16384, normalization_type="syncbatchnorm",
        )  # fmt: skip

    @classmethod
    def sc_base(cls, **overrides: Any) -> Self:
        """`mega_sc_raw_base`: Speech Commands, 16,000 samples in chunks of 1,000."""
        return cls._lra_values(
            60, 120, overrides, num_hidden_layers=6, shared_representation_size=30, truncation=1000,
            use_chunking=True, chunk_size=1000, max_positions=16000, num_labels=10,
        )  # fmt: skip

    @classmethod
    def sc_big(cls, **overrides: Any) -> Self:
        """`mega_sc_raw_big`: `sc_base` with a width of 72."""
        wider = {
            "hidden_size": 72, "intermediate_size": 144, "nffn_hidden_size": 144, "classifier_hidden_size": 144,
            "shared_representation_size": 36,
        }  # fmt: skip
        return cls.sc_base(**wider | overrides)

    @classmethod
    def image_base_patch16_224(cls, **overrides: Any) -> Self:
        """`mega_base_patch16_224`: ImageNet with `MegaForImageClassification`, 90.7 M parameters.

        `drop_path_rate` is 0.3 as in the published code. The recipe of the paper has 0.2.
        """
        width, values = overrides.get("hidden_size", 768), overrides.get("intermediate_size", 1536)
        size, patch = (overrides.get(name, default) for name, default in (("image_size", 224), ("patch_size", 16)))
        fields = {
            "input_type": "patches", "hidden_size": width, "intermediate_size": values, "nffn_hidden_size": values,
            "shared_representation_size": 256, "num_hidden_layers": 12, "normalization_type": "layernorm",
            "attention_activation": "laplace", "relative_positional_bias": "simple",
            "max_positions": (size // patch) ** 2, "ema_shift": True, "final_norm": True, "output_projection": True,
            "drop_path_rate": 0.3, "pooling": "mean", "dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "nffn_activation_dropout_prob": 0.0, "classifier_num_layers": 0,
            "classifier_activation": "silu", "num_labels": 1000, "initializer_range": 0.02,
        }  # fmt: skip
        return cls(**fields | overrides)

    @classmethod
    def image_tiny_patch16_224(cls, **overrides: Any) -> Self:
        """`mega_tiny_patch16_224`: `image_base_patch16_224` with a width of 192, 6.2 M parameters."""
        narrower = {"hidden_size": 192, "intermediate_size": 384, "shared_representation_size": 64}
        return cls.image_base_patch16_224(**narrower | overrides)

    @classmethod
    def _lm(cls, width: int, values: int, overrides: dict[str, Any], **fields: Any) -> Self:
        """Return a language model: norms before the layers, softmax in chunks, rotary bias, `</s>` as first token."""
        fields |= {
            "hidden_size": width, "intermediate_size": values, "nffn_hidden_size": values, "bidirectional": False,
            "is_decoder": True, "use_chunking": True, "truncation": 8192, "normalization_type": "layernorm",
            "final_norm": True, "final_norm_affine": False, "scale_embedding": True, "lm_head_bias": False,
            "add_lm_hidden_dense_layer": False, "bos_token_id": 2, "initializer_range": 0.02,
        }  # fmt: skip
        return cls(**fields | overrides)

    @classmethod
    def lm_wikitext103(cls, vocab_size: int = 267744, **overrides: Any) -> Self:
        """`mega_lm_adaptive_big`: `MegaForCausalLM` with adaptive softmax, 252 M parameters."""
        cutoffs = [20000, 60000]
        return cls._lm(
            1024, 2048, overrides, vocab_size=vocab_size, num_hidden_layers=16, shared_representation_size=256,
            chunk_size=1024, max_positions=8096, dropout_prob=0.3, adaptive_softmax_dropout=0.2,
            adaptive_input_cutoffs=cutoffs, adaptive_softmax_cutoffs=cutoffs, tie_adaptive_projections=True,
        )  # fmt: skip

    @classmethod
    def lm_enwik8(cls, vocab_size: int = 208, **overrides: Any) -> Self:
        """`mega_lm_enwik8_base`: language model of bytes, 39 M parameters."""
        return cls._lm(
            512, 1024, overrides, vocab_size=vocab_size, num_hidden_layers=12, shared_representation_size=128,
            chunk_size=2048, max_positions=10384, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            nffn_activation_dropout_prob=0.0,
        )  # fmt: skip

    @classmethod
    def _wmt(cls, width: int, values: int, shared: int, dropout: float, overrides: dict[str, Any]) -> Any:
        """Return a translation model: norms after the residual, softmax over all positions, simple bias."""
        fields = {
            "is_encoder_decoder": True, "hidden_size": width, "intermediate_size": values, "nffn_hidden_size": values,
            "shared_representation_size": shared, "num_hidden_layers": 6, "max_positions": 1024,
            "relative_positional_bias": "simple", "normalization_type": "layernorm", "normalize_before_mega": False,
            "normalize_before_ffn": False, "scale_embedding": True, "dropout_prob": dropout,
            "initializer_range": 0.02,
        }  # fmt: skip
        config_class: Any = cls
        return config_class.with_encoder()(**fields | overrides)

    @classmethod
    def wmt_en_de(cls, vocab_size: int = 33000, **overrides: Any) -> Any:
        """`mega_wmt_en_de`: `MegaForConditionalGeneration` with a joint vocabulary, 63 M parameters."""
        return cls._wmt(512, 1024, 128, 0.15, {"vocab_size": vocab_size} | overrides)

    @classmethod
    def wmt_en_de_big(cls, vocab_size: int = 33000, **overrides: Any) -> Any:
        """`mega_wmt_en_de_big`: `wmt_en_de` with a width of 1,024."""
        return cls._wmt(1024, 2048, 256, 0.3, {"vocab_size": vocab_size} | overrides)
