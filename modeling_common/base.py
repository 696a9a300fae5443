"""Base classes of the models of all families, with and without a head."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg

# Checks the versions, also for the code in a model folder.
from luna_mega import compat as compat
from luna_mega.modeling_common.configuration import is_own
from luna_mega.modeling_common.outputs import CACHE

# Argument with the input of a model, by `config.input_type`.
INPUT_NAMES = {"tokens": "input_ids", "values": "input_values", "patches": "pixel_values"}
# Fields of the configuration that only apply to one kind of input.
INPUT_OF_FIELD = {"vocab_size": "tokens", "image_size": "patches", "patch_size": "patches"}
EMBEDDINGS = {"tokens": "word_embeddings", "values": "value_embeddings", "patches": "patch_embeddings"}

# transformers 5.24 renamed `past_key_values` to `cache`, and accepts the old name until 5.40. Earlier versions pass the
# old name themselves: with a removal version in the past, the decorator does not warn.
accept_past_key_values = deprecate_kwarg(
    "past_key_values",
    "5.40.0" if CACHE == "cache" else "5.0.0",
    new_name="cache",
    raise_if_both_names=True,
    additional_message="Pass only `cache`.",
)


def exact_dtype() -> torch.dtype:
    """Return the dtype of new parameters that stay in float32 in a half-precision model: float32, or a wider default.

    `_keep_in_fp32_modules_strict` only affects `from_pretrained`, not the construction in half precision.
    """
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def trunc_normal_(tensor: torch.Tensor, **options: Any) -> None:
    """Initialize a tensor with `init.trunc_normal_`, unless it is a `FakeTensor`.

    torch 2.13 samples again until all values are within the bounds, but a `FakeTensor` has no values.
    """
    if type(tensor).__name__ != "FakeTensor":
        init.trunc_normal_(tensor, **options)


def make_embedding(rows: int, width: int, zero_row: int | None) -> nn.Embedding:
    """Return an embedding whose row `zero_row` is initialized to 0 by `clear_row`, as in fairseq; None = no such row.

    Unlike `padding_idx`, the row is trained: masked tokens have no gradient, and the padding token can change.
    """
    embedding: Any = nn.Embedding(rows, width)
    embedding.zero_row = zero_row if zero_row is not None and 0 <= zero_row < rows else None
    return embedding


def clear_row(module: nn.Module) -> None:
    """Set the `zero_row` of a new embedding to 0."""
    row, weight = getattr(module, "zero_row", None), cast(Any, getattr(module, "weight", None))
    if row is not None and not getattr(weight, "_is_hf_initialized", False):
        init.zeros_(weight[row])


class CommonPreTrainedModel(PreTrainedModel):
    """Base of the `PreTrainedModel` of each family."""

    body_class: Any  # the model without a head: `LunaModel`, `MegaModel` or `MegalodonModel`
    body_options: dict[str, Any] = {}  # constructor arguments of the body in models with a head
    cache_class: Any  # the cache of a decoder
    seq2seq_cache_class: Any  # the cache of a decoder with cross-attention
    supports_gradient_checkpointing = True
    # Adds a section on loading the model to the card in a folder that is pushed to a repository.
    card_writer: ClassVar[Callable[[Any, str | os.PathLike[str], str], None] | None] = None
    # Compares the version of the code in a folder that is loaded with that of this package.
    folder_reader: ClassVar[Callable[[Path], None] | None] = None
    # "sdpa" (default) is `luna_mega.kernels`; "eager" computes attention step by step and returns its weights.
    _supports_sdpa = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.main_input_name = INPUT_NAMES[config.input_type]
        self.model_tags = ["luna-mega"]  # of model cards

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing for a class of this package: `save_pretrained` saves its code in any case."""
        if not is_own(cls):
            super().register_for_auto_class(auto_class)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Self:
        """Load a folder or repository; log that the code in a folder should be renewed."""
        if cls.folder_reader is not None and pretrained_model_name_or_path is not None:
            cls.folder_reader(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model and its code (`luna_mega.save_code`)."""
        if self.is_remote_code():  # transformers adds the code of a user's class to `config.auto_map`
            vars(self.config).setdefault("auto_map", {})
        super().save_pretrained(*args, **kwargs)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        if (write_card := type(self).card_writer) is not None:
            write_card(self, working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation not in (None, "sdpa", "eager"):
            raise ValueError(
                f'Specified `attn_implementation="{attn_implementation}"` is not supported: {type(self).__name__} has '
                "its own kernels; omit `attn_implementation`, or pass 'eager' to get attention weights"
            )
        return attn_implementation or "sdpa"

    def require_tokens(self) -> None:
        """Raise `ValueError` for a model whose inputs are not tokens."""
        if self.config.input_type != "tokens":
            raise ValueError(f"{type(self).__name__} needs input_type='tokens', got {self.config.input_type!r}")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary of a model of tokens."""
        self.require_tokens()
        return super().resize_token_embeddings(*args, **kwargs)

    def share_modules(self) -> None:
        """Replace modules that share a weight by one module; encoder-decoders override this."""

    def unread_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that no loss of this class depends on."""
        return ()

    def freeze_unread(self) -> None:
        """Freeze `unread_parameters()` of a class of this package: DDP raises an error for parameters without gradient.

        A class of a user, including a subclass of a head of this package, may use every output.
        """
        if is_own(type(self)):
            for parameter in self.unread_parameters():
                parameter.requires_grad_(False)

    def post_init(self) -> None:
        """Freeze unread parameters, and restrict `_no_split_modules` and `_fsdp_plan` to the modules of this instance.

        Accelerate raises an error for a class without a module, and transformers warns about unused rules. Modules
        with tied weights have no rule, because FSDP2 does not support a weight in two groups.
        """
        super().post_init()
        self.freeze_unread()
        classes = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = {*(self._no_split_modules or ())} & classes
        tied = {name.rpartition(".")[0] for pair in self.all_tied_weights_keys.items() for name in pair}
        rules = {re.sub(r"\.\d+\b", ".*", name) for name, _ in self.named_modules()} - tied
        self._fsdp_plan = {rule: style for rule, style in (self._fsdp_plan or {}).items() if rule in rules}

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh: Any) -> PreTrainedModel:
        """Distribute a model over `mesh`, None = a single process; transformers calls this before it loads weights.

        Weights are tied first, because transformers only ties them after FSDP2 has sharded them. If the number of
        processes does not divide their rows, an update would then change only one of the two tied weights.

        Raises:
            ValueError: Tensor parallelism is requested. Without a plan, transformers would replicate the model.
        """
        if distributed_config is not None and (distributed_config.tp_plan or distributed_config.tp_size > 1):
            raise ValueError(
                f"`tp_plan={distributed_config.tp_plan!r}` with `tp_size={distributed_config.tp_size}`: "
                f"{type(model).__name__} does not support tensor parallelism; use FSDP2 (`fsdp_size`) or `device_map`"
            )
        if mesh is not None:
            model.tie_weights(recompute_mapping=False)
            model.share_modules()
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie weights; transformers calls this after constructing, loading and resizing a model."""
        super().tie_weights(*args, **kwargs)
        if self.device.type != "meta":  # on meta, transformers still needs every name to load weights
            self.share_modules()
        if kwargs.get("missing_keys") is not None:  # `from_pretrained` has replaced the parameters
            self.freeze_unread()


class StateRecorder(nn.Module):
    """Records the `[B, T, d]` states before and after a layer for `output_hidden_states`.

    The next layer must read its input from the recorded tensor. Otherwise the recorded tensor has no gradient.
    """

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return after


# At runtime the models list the base class of their family after the mixins.
if TYPE_CHECKING:
    ModelMixin = CommonPreTrainedModel
else:
    ModelMixin = object


class BodyMixin(ModelMixin):
    """Base of `LunaModel`, `MegaModel` and `MegalodonModel`: an encoder or decoder with embeddings and without a head.

    The attributes specify which inputs the model supports:

    * `own_options`: keyword arguments of this model in addition to the common ones.
    * `weight_options`: keyword arguments that request attention weights.
    * `reads_target`: whether the tokens are the target of an encoder-decoder, whose mask `find_target_mask` infers.
    * `packs`: whether the model is a Luna, with a packed sequence P. Luna embeds `position_ids`, which only mark
      sequence boundaries in other models, and returns attention weights also with a filled cache.
    * `has_read_types`: whether the values of a batch of token types have been checked.
    * `returns_mask`: whether outputs contain the mask. The encoder of a Mega encoder-decoder has none, because an
      exported decoder would require it as an input.
    * `closes_gaps`: whether layers require the kept positions of a row to follow each other, as moving averages do.
    * `token_types`: the number of token types; 0 = the model has no type embeddings.
    * `input_width`: the width of `inputs_embeds`.
    * `built_with`: the configuration fields that determine the modules, with their values at construction.
    """

    own_options: frozenset[str] = frozenset({"position_ids", "token_type_ids"})
    weight_options: tuple[str, ...] = ("output_attentions",)
    reads_target = False
    packs = False
    has_read_types = False
    returns_mask = True
    closes_gaps: bool = True
    embeddings_name: str = ""  # name of the module with the input embedding; "" = the model
    embedding_names = EMBEDDINGS  # name of the input embedding by `config.input_type`

    def __init__(self, config: PreTrainedConfig):
        config.validate_architecture()  # fields may have been assigned after the constructor
        super().__init__(config)
        self.built_with = {name: getattr(config, name) for name in ("is_decoder", "add_cross_attention")}
        self._input_embed_layer = self.embedding_names[config.input_type]
        if config.is_encoder_decoder:
            family = type(self).__name__.removesuffix("Model")
            raise ValueError(
                f"{type(self).__name__} is an encoder or a decoder, but the configuration has is_encoder_decoder=True; "
                f"use {family}Seq2SeqModel, {family}ForConditionalGeneration or their Auto classes"
            )

    @property
    def token_types(self) -> int:
        return 0

    @property
    def input_width(self) -> int:
        return self.config.hidden_size

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.require_tokens()
        setattr(self.get_submodule(self.embeddings_name), self._input_embed_layer, value)

    def check_built(self) -> None:
        """Raise `ValueError` if a field that determines the modules has been changed after their construction."""
        for name, value in self.built_with.items():
            if getattr(self.config, name) != value:
                raise ValueError(
                    f"`config.{name}` has been changed to {getattr(self.config, name)} after the construction of the "
                    "model; create it with this value"
                )
