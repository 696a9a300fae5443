"""The base classes of both models: what transformers asks of every class, and of a model without a head."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from luna_mega.compat import accept_cache_names
from luna_mega.modeling_common.sharding import ShardedLayout
from luna_mega.modeling_common.tensor_parallel import TensorParallelMixin, wildcard
from luna_mega.modeling_common.validation import INPUT_NAMES

# Fields of the configuration that belong to one kind of input and say nothing of a model that reads another.
INPUT_OF_FIELD = {"vocab_size": "tokens", "image_size": "patches", "patch_size": "patches"}
_EMBEDDINGS = {"tokens": "word_embeddings", "values": "value_embeddings", "patches": "patch_embeddings"}


def exact_dtype() -> torch.dtype:
    """Return the dtype of new parameters that stay in float32 in a half-precision model: float32, or a wider default.

    `_keep_in_fp32_modules_strict` only affects `from_pretrained`, not the construction in half precision.
    """
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class CommonPreTrainedModel(TensorParallelMixin, PreTrainedModel):
    """Base of `LunaPreTrainedModel` and `MegaPreTrainedModel`."""

    supports_gradient_checkpointing = True
    # "sdpa" (default) is `luna_mega.kernels`, "eager" computes attention step by step and has weights to return.
    _supports_sdpa = True

    def __init_subclass__(cls, **kwargs):
        """Let `forward` accept its cache under both names, wherever the class inherits it from."""
        super().__init_subclass__(**kwargs)
        cls.forward = accept_cache_names(cls.forward)

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.main_input_name = INPUT_NAMES[config.input_type]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def require_tokens(self):
        """Refuse a configuration of real values for a class or method that needs tokens."""
        if self.config.input_type != "tokens":
            raise ValueError(f"{type(self).__name__} needs input_type='tokens', got {self.config.input_type!r}")

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Resize the vocabulary of a model of tokens."""
        self.require_tokens()
        return super().resize_token_embeddings(*args, **kwargs)

    def share_modules(self):
        """Make modules that have one weight one module; encoder-decoders have such."""

    def unread_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that no loss of this class depends on."""
        return ()

    def post_init(self):
        """Finish construction, and keep of the layers and plans that tools read only what this instance has.

        accelerate refuses the name of a class that the model lacks, transformers warns of a rule for nothing, and
        FSDP2 does not take a weight that is in two groups: what is tied goes with the rest of the model.
        """
        super().post_init()
        classes = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = set(self._no_split_modules) & classes
        tied = {name.rpartition(".")[0] for pair in self.all_tied_weights_keys.items() for name in pair}
        rules = {wildcard(name) for name, _ in self.named_modules()} - tied
        self._fsdp_plan = {rule: style for rule, style in self._fsdp_plan.items() if rule in rules}

    @classmethod
    def maybe_distribute_model(cls, model: PreTrainedModel, distributed_config, mesh) -> PreTrainedModel:
        """Distribute a model whose weights are tied already; transformers calls this before it loads them.

        FSDP2 must know that two names are one weight: by itself transformers ties them after, and where their rows do
        not divide by the processes, an update then reaches one of the two alone. Tensor parallelism splits the names of
        a plan one by one, and is left to transformers.
        """
        if mesh is not None and distributed_config.tp_size == 1:
            model.tie_weights(recompute_mapping=False)
            model.share_modules()
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def tie_weights(self, *args, **kwargs):
        """Tie weights, and freeze the parameters that are never read; they keep their places in checkpoints.

        transformers calls this when a model has been made and when it has been loaded.
        """
        super().tie_weights(*args, **kwargs)
        if self.device.type != "meta":  # transformers loads each name that a model has
            self.share_modules()
        for parameter in self.unread_parameters():
            parameter.requires_grad_(False)


class StateRecorder(nn.Module):
    """Records the `[B, T, d]` states before and after a layer for `output_hidden_states`.

    The next layer must read its input from the recorded tensor. Otherwise the recorded tensor has no gradient.
    """

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return after


class BodyMixin:
    """Base of `LunaModel`, `MegaModel` and `MegalodonModel`: one side without a head, which contains the embeddings.

    The attributes specify which inputs the model supports:

    * `own_options`: keyword arguments of this model in addition to those of every model.
    * `weight_options`: keyword arguments that request attention weights.
    * `uses_positions`: whether the model uses `position_ids`; else they only mark boundaries of sequences.
    * `returns_cached_weights`: whether attention to a filled cache returns its weights.
    * `packs`: whether the model has a packed sequence P.
    * `closes_gaps`: whether layers require the kept positions of a row to follow each other, as moving averages do.
    """

    own_options: frozenset[str] = frozenset({"position_ids"})
    weight_options: tuple[str, ...] = ("output_attentions",)
    uses_positions = False
    returns_cached_weights = False
    packs = False
    closes_gaps = True
    embeddings_name: str  # of the module that contains `word_embeddings` or `value_embeddings`

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        if config.is_encoder_decoder:
            family = type(self).__name__.removesuffix("Model")
            raise ValueError(
                f"{type(self).__name__} is one side only, and the configuration has is_encoder_decoder=True: use "
                f"{family}Seq2SeqModel, {family}ForConditionalGeneration or their Auto classes"
            )

    @property
    def input_width(self) -> int:
        """Return the width of `inputs_embeds`."""
        return self.config.hidden_size

    def check_shards(self, layout: ShardedLayout) -> None:
        """Raise `ValueError` for context-parallel shards that the model does not support."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens, of real values or of patches."""
        return getattr(getattr(self, self.embeddings_name), _EMBEDDINGS[self.config.input_type])

    def set_input_embeddings(self, value: nn.Module):
        """Replace the embedding of tokens."""
        self.require_tokens()
        getattr(self, self.embeddings_name).word_embeddings = value
