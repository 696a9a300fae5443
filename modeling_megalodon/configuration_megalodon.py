"""Configuration of the Megalodon models."""

from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.configuration import ABSENT_FIELDS, MOST_IN_CHUNK, SharedConfig, strict
from luna_mega.modeling_megalodon.presets_megalodon import MegalodonPresets

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "initializer": ("he", "bert", "gaussian", "xavier", "none"),
    "pooling": ("last", "mean"),
}
# Fields that the shared code reads, with their only values.
_FIXED = {"input_type": "tokens", "is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False}


@strict
class MegalodonConfig(MegalodonPresets, SharedConfig, PreTrainedConfig):
    """Configuration of a Megalodon model (Ma et al. 2024, arXiv 2404.08801), a causal language model.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Width d of the model.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Attention heads H.
        shared_representation_size: Width z of queries and keys of all heads.
        value_size: Width v of the values of all heads.
        intermediate_size: Width of the feed-forward layer.
        ema_projection_size: Complex states N of the moving average, for every channel.
        norm_num_groups: Groups of features G of the timestep norm.
        chunk_size: Positions of an attention chunk, counted from the first token of a sequence.
        rope_theta: Base of the rotary frequencies. Checkpoints contain their own frequencies.
        norm_eps: Epsilon of every norm.
        norm_affine: RMSNorm and LayerNorm have parameters. The timestep norm always has.
        swiglu: The feed-forward layer is gated by a third matrix.
        rescale_nffn: The output of the feed-forward layer is multiplied by a learned vector.
        scale_embedding: Multiply embeddings by sqrt(d).
        tie_word_embeddings: The matrix of the output layer is the embedding.
        output_size: Number of scores of the output layer. None = `vocab_size`.
        initializer: Initialization of linear layers: `"he"` (standard deviation 1 / sqrt(3 inputs)), `"bert"` (0.02),
            `"gaussian"` (1, truncated at 3), `"xavier"` (uniform) or `"none"` (default of PyTorch).
        dropout_prob: Dropout of embeddings and of the outputs of both layers of a block.
        hidden_dropout_prob: Dropout of the normalized moving average, the gated attention and the feed-forward states.
        attention_probs_dropout_prob: Dropout of attention weights.
        windowed_statistics: In evaluation, the norms use statistics of the last 6 chunks, as inference of the published
            code does. From 8 chunks on, the prompt is processed in pairs of chunks, and after each pair the statistics
            are replaced by a second pass over the last 6 chunks. Such a prompt must be passed in one call
            without padding. Single positions never restart the statistics. False = statistics of all positions.
        unpad_inputs: Layers skip padding. States at padding are 0. No effect if states or weights are returned, with a
            cache, and in compiled or exported programs.
        pooling: Input of the sequence classifier: the last token (`"last"`) or the mean (`"mean"`).
        classifier_num_layers, classifier_hidden_size, classifier_activation, classifier_bias, classifier_dropout: Dense
            layers of the classification head, their width (None = d) and activation, the bias of its last layer, and
            the dropout before each (None = `hidden_dropout_prob`).
        pad_token_id: Without an `attention_mask` these tokens are padding. None = no token is. It can be changed at
            any time, also in a model.
        bos_token_id, eos_token_id: Those of Llama 2's vocabulary, which the presets have.
        use_cache: Return a cache in evaluation.

    Raises:
        ValueError: Invalid values or combinations of fields.

    Example:
        >>> MegalodonConfig.megalodon_7b().chunk_size
        4096
    """

    model_type = "megalodon"
    input_type = "tokens"
    add_token_type_embeddings = False
    default_fields = {"classifier_hidden_size": "hidden_size", "classifier_dropout": "hidden_dropout_prob"}
    base_model_fsdp_plan = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight"}
    attribute_map = {
        "d_model": "hidden_size", "attention_chunk": "chunk_size",
        "dropout": "dropout_prob", "attention_dropout": "attention_probs_dropout_prob", "layer_norm_eps": "norm_eps",
    }  # fmt: skip
    absent_fields = ABSENT_FIELDS | {
        "hidden_act": ("silu", "omit it, because the activation is always SiLU"),
        "initializer_range": (None, "use `initializer`"),
        "max_position_embeddings": (None, "omit it, because inputs can have any length"),
        "position_embedding_type": (None, "omit it, because positions are always rotary"),
        "type_vocab_size": (0, "omit it, because there are no token types"),
    }

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 1
    shared_representation_size: int = 256
    value_size: int = 2048
    intermediate_size: int = 2560
    ema_projection_size: int = 16
    norm_num_groups: int = 32
    chunk_size: int = 2048
    rope_theta: float | int = 10000.0
    norm_eps: float = 1e-5
    norm_affine: bool = True
    swiglu: bool = False
    rescale_nffn: bool = False
    scale_embedding: bool = False
    tie_word_embeddings: bool = False
    output_size: int | None = None
    initializer: str = "he"
    dropout_prob: float | int = 0.0
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    windowed_statistics: bool = False
    unpad_inputs: bool = False
    pooling: str = "last"
    classifier_num_layers: int = 0
    classifier_hidden_size: int | None = None
    classifier_activation: str = "tanh"
    classifier_bias: bool = True
    classifier_dropout: float | int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    use_cache: bool = True
    is_decoder: bool = True
    is_encoder_decoder: bool = False
    add_cross_attention: bool = False

    @property
    def scores(self) -> int:
        """Return the number of scores of the output layer."""
        return self.vocab_size if self.output_size is None else self.output_size

    def validate_architecture(self) -> None:
        """Raise `ValueError` for invalid fields; `@strict` calls this after `__init__` and before saving."""
        self._check_choices(_CHOICES)
        self._check_activations("classifier_activation")
        sizes = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "shared_representation_size",
            "value_size", "intermediate_size", "ema_projection_size", "norm_num_groups", "output_size",
            "classifier_hidden_size",
        )  # fmt: skip
        self._check_counts(sizes)
        self._check_counts(["chunk_size"], most=MOST_IN_CHUNK)
        self._check_counts(["classifier_num_layers"], least=0)
        self._check_probabilities(
            "dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"
        )
        self._check_deviations("norm_eps")
        for field, value in _FIXED.items():
            if getattr(self, field) != value:
                raise ValueError(f"`{field}` must be {value!r} for Megalodon, got {getattr(self, field)!r}; omit it")
        if not 0.0 < self.rope_theta < float("inf"):
            raise ValueError(f"rope_theta must be a number above 0, got {self.rope_theta}")
        heads, groups = self.num_attention_heads, self.norm_num_groups
        if self.shared_representation_size % (2 * heads):
            raise ValueError(
                f"`shared_representation_size` must be an even number for each of the {heads} heads, as rotary "
                f"positions require pairs of features, got {self.shared_representation_size}"
            )
        if self.value_size % heads:
            raise ValueError(f"num_attention_heads={heads} does not divide value_size={self.value_size}")
        if self.hidden_size % groups:
            raise ValueError(f"norm_num_groups={groups} does not divide hidden_size={self.hidden_size}")
        if self.tie_word_embeddings and self.scores != self.vocab_size:
            raise ValueError(
                f"tie_word_embeddings=True requires an output layer of vocab_size={self.vocab_size} rows, but "
                f"`output_size` is {self.output_size}; omit it, or pass tie_word_embeddings=False"
            )


__all__ = ["MegalodonConfig"]
