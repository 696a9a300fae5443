"""Base of the caches: what a decoder remembers between calls, as tensors that transformers' generation can reorder."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import ref

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig

_PREFIX_TUNING = "in place of prefix tuning, which brings keys and values, use prompt tuning or LoRA"


class Constants:
    """Values that depend on weights alone, kept until a weight changes.

    They are no part of a cache's state: copies of it and files begin without them.
    """

    def __init__(self):
        self.kept = {}

    def __deepcopy__(self, memo: dict) -> "Constants":
        return Constants()

    def __reduce__(self):
        return Constants, ()

    def get(self, name: str, weights: Sequence[torch.Tensor], compute: Callable[[], Any], key: Hashable = None) -> Any:
        """Return `compute()`, or what it gave the last time if `key` and `weights` are the same since.

        Nothing is kept in compiled programs, for autograd and of weights that do not tell when they change.
        """
        if torch.compiler.is_compiling() or any(x.is_inference() for x in weights):
            return compute()
        if torch.is_grad_enabled() and any(x.requires_grad for x in weights):
            return compute()
        key = (key, torch.is_inference_mode_enabled())  # what is computed there stays out of autograd for good
        stamps, kept = [(x._version, x.data_ptr()) for x in weights], self.kept.get(name)
        if kept is not None:
            same = kept[0] == key and kept[2] == stamps
            if same and all(known() is x for known, x in zip(kept[1], weights, strict=True)):
                return kept[3]
        value = compute()
        self.kept[name] = (key, [ref(x) for x in weights], stamps, value)
        return value


class StateLayer(CacheLayerMixin):
    """The memory of one layer over B sequences: the attributes that `fields` names, tensors `[B, ...]` or None."""

    # A number among the attributes would be a constant of an exported program, which then took no longer cache.
    __slots__ = ("_constants", "_seen")
    is_sliding = False
    supports_early_init = False
    fields: tuple[str, ...]

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        """Forget everything."""
        for name in self.fields:
            setattr(self, name, None)
        self.seen, self.is_initialized = 0, False

    def store(self, length: int = 0, **tensors: torch.Tensor | None):
        """Replace tensors after `length` more positions."""
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        self.seen, self.is_initialized = self.seen + length, True

    @property
    def seen(self) -> int:
        """Return the number of positions so far, padding included; in an exported program whether there are any."""
        return getattr(self, "_seen", int(self.is_initialized))

    @seen.setter
    def seen(self, count: int):
        self._seen = count

    @property
    def constants(self) -> Constants:
        """Return what the layer's module has computed of its weights alone."""
        if not hasattr(self, "_constants"):
            self._constants = Constants()
        return self._constants

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, without those that are None."""
        return {name: tensor for name in self.fields if (tensor := getattr(self, name)) is not None}

    @property
    def batch_size(self) -> int | None:
        """B, None before anything is stored."""
        return len(next(iter(self.tensors.values()))) if self.is_initialized else None

    def get_seq_length(self) -> int:
        """Return the number of positions seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the positions that a mask for `query_length` more of them covers, and how many it skips."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor):
        """Do nothing: `store` brings the tensors."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Refuse keys and values alone."""
        raise NotImplementedError(f"a {type(self).__name__} keeps more than keys and values: call `store`")

    def crop(self, max_length: int):
        """Refuse to forget the last positions: a recurrence cannot run backwards.

        `max_length`: the positions to keep, or below 0 how many to forget.
        """
        if max_length < 0:
            max_length += self.seen
        if max_length < self.seen:
            raise ValueError(
                f"the cache cannot be cropped from {self.seen} to {max_length} positions, as its states hold all of "
                "them: copy the cache before the positions that may have to go, or compute it anew"
            )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]):
        """Replace every tensor by `function` of it."""
        for name, tensor in self.tensors.items():
            setattr(self, name, function(tensor))

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Put the sequences in the order of `beam_idx`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor):
        """Keep the sequences of these indices."""
        self.map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int):
        """Repeat every sequence `repeats` times in place."""
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class StateCache(Cache):
    """The `past_key_values` of a decoder, a layer of `layer_class` for each of its own; made empty, filled in place.

    `config`: the configuration of the decoder.
    """

    layer_class: type[StateLayer]
    layers: list[Any]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[self.layer_class() for _ in range(config.num_hidden_layers)])

    def check(self, config: PreTrainedConfig, batch: int, ranks: int) -> None:
        """Refuse to be the cache of another model or batch than one of `config`, spread over `ranks`."""
        raise NotImplementedError

    def check_source(self, config: PreTrainedConfig, batch: int, length: int | None, ranks: int) -> None:
        """Refuse to be the source of another model or batch; `length`: its positions, None = it is not given again."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the tensors hold on to."""
        return sum(x.untyped_storage().nbytes() for layer in self.layers for x in layer.tensors.values())

    def detach(self):
        """Cut the graph: what was computed so far gets no gradient from what follows (truncated back-propagation)."""
        for layer in self.layers:
            layer.map(torch.Tensor.detach)


class StateSeq2SeqCache(EncoderDecoderCache):
    """The `past_key_values` of a decoder with cross-attention: a cache of the target and one of the source.

    `config`: the configuration of the decoder; an encoder-decoder has it as `config.decoder_config`.
    """

    target_class: type[StateCache]
    source_class: type[StateCache]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(self.target_class(config), self.source_class(config))

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the tensors hold on to."""
        return self.self_attention_cache.nbytes + self.cross_attention_cache.nbytes

    def check_dynamic_cache(self, method: str):
        """Refuse nothing: both caches have every method, or say why not."""


def split_cache(cache: Cache | None) -> tuple[StateCache | None, StateCache | None]:
    """Return the parts of a cache that are about the positions so far and about an encoder's output."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return cache, None


def layer_caches(
    cache: StateCache | None, cross_cache: StateCache | None, count: int
) -> list[tuple[StateLayer | None, StateLayer | None]]:
    """Return the parts of both caches for each of `count` layers."""
    none = [None] * count
    parts = (none if cache is None else cache.layers, none if cross_cache is None else cross_cache.layers)
    return list(zip(*parts, strict=True))


def new_cache(model: Any) -> Cache:
    """Return an empty cache for the decoder of `model`, of its `cache_class` or `seq2seq_cache_class`."""
    config = _decoder_config(model)
    return _kind(model, config)(config)


def _decoder_config(model: Any) -> PreTrainedConfig:
    return model.config.decoder_config if model.config.is_encoder_decoder else model.config


def _kind(model: Any, config: PreTrainedConfig) -> type[Cache]:
    return model.seq2seq_cache_class if config.add_cross_attention else model.cache_class


def check_class(model: Any, cache: Cache | None):
    """Refuse a cache that is not of the class of `model`'s decoder."""
    kind = _kind(model, _decoder_config(model))
    if cache is not None and not isinstance(cache, kind):
        raise ValueError(
            f"past_key_values must be a {kind.__name__}, got a {type(cache).__name__}; leave it out to begin; "
            f"{_PREFIX_TUNING}"
        )


def keeps_cache(model: Any) -> bool:
    """Return whether a decoder begins a cache by itself: as `config.use_cache` says, but not in training.

    Nor while it is exported: the lengths of a cache that no input shows would be those of the example.
    """
    return model.config.use_cache and not model.training and not torch.compiler.is_exporting()


def begin_cache(owner: Any, cache: Cache | None, use_cache: bool | None) -> Cache | None:
    """Return the cache that a forward pass of an encoder or a decoder reads and updates, or None.

    Args:
        owner: the encoder or decoder without a head.
        cache: the cache that was passed, or None.
        use_cache: whether to create a cache if `cache` is None; None = see `keeps_cache`.

    Raises:
        ValueError: An encoder has no cache, the cache is of another class, or a layer does not run exactly once.
    """
    config = owner.config
    if not config.is_decoder:
        if cache is not None or use_cache:
            raise ValueError(
                "past_key_values and use_cache=True need a decoder (is_decoder=True): an encoder's output depends on "
                f"what is yet to come; {_PREFIX_TUNING}"
            )
        return None
    check_class(owner, cache)
    if use_cache is None:
        use_cache = keeps_cache(owner)
    if cache is None and use_cache:
        cache = new_cache(owner)
    if cache is not None and owner.training:
        repeats = any(getattr(module, "gradient_checkpointing", False) for module in owner.modules())
        again = repeats and torch.is_grad_enabled()
        if again or getattr(config, "layerdrop", 0):
            reason = "gradient checkpointing runs a layer twice" if again else "layerdrop leaves layers out"
            raise ValueError(f"{reason}, and a cache needs each to run once: pass use_cache=False")
    return cache
