"""Published sizes of Megalodon as class methods of `MegalodonConfig`. Keyword arguments override a size.

The first five match the published code, with chunks of 2,048 positions. Numbers of parameters are for the
default vocabulary of 32,000 tokens.
"""

from typing import Any, Self


class MegalodonPresets:
    """Base class of `MegalodonConfig` with its presets."""

    @classmethod
    def mega_200m(cls, **overrides: Any) -> Self:
        """`mega200M`: 220,627,968 parameters; the defaults of the configuration."""
        return cls(**overrides)

    @classmethod
    def mega_1_3b(cls, **overrides: Any) -> Self:
        """`mega1.3B`: 1,342,832,640 parameters."""
        fields = {
            "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 2, "shared_representation_size": 512,
            "value_size": 4096, "intermediate_size": 4864, "norm_num_groups": 64,
        }  # fmt: skip
        return cls(**fields | overrides)

    @classmethod
    def mega_1_3b_pg19(cls, **overrides: Any) -> Self:
        """`mega1.3B_pg19`: 1,327,628,288 parameters, for books."""
        fields = {"intermediate_size": 3584, "swiglu": True, "scale_embedding": True, "tie_word_embeddings": True}
        return cls.mega_1_3b(**fields | overrides)

    @classmethod
    def mega_7_1b(cls, **overrides: Any) -> Self:
        """`mega7.1B`: 7,117,381,632 parameters."""
        fields = {
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 4, "shared_representation_size": 1024,
            "value_size": 8192, "intermediate_size": 11264, "norm_num_groups": 64,
        }  # fmt: skip
        return cls(**fields | overrides)

    @classmethod
    def mega_7_3b(cls, **overrides: Any) -> Self:
        """`mega7.3B`: 7,385,817,088 parameters."""
        return cls.mega_7_1b(**{"intermediate_size": 8192, "swiglu": True} | overrides)

    @classmethod
    def megalodon_7b(cls, **overrides: Any) -> Self:
        """The model of the paper: `mega7.3B` with chunks of 4,096 positions and slower rotations."""
        return cls.mega_7_3b(**{"chunk_size": 4096, "rope_theta": 100_000.0} | overrides)
