"""Base classes of the caches of decoders, whose states transformers' generation can reorder."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.kernels.for_models import EXPORTED, TRANSFORMED, forbid_capture, is_capturing, mode
from luna_mega.modeling_common.base import CommonPreTrainedModel

_PREFIX_TUNING = "prefix tuning, which passes keys and values, is not supported: use prompt tuning or LoRA"


class _Derived(local):
    """Results of `derive` in the current thread with their keys, by owner and name; None = they are not kept."""

    values: dict[tuple[Hashable, str], tuple[Hashable, Any]] | None = None


_derived = _Derived()


@contextmanager
def keep_derived(enabled: bool) -> Iterator[None]:
    """Keep the results of `derive` in the block, in which weights must not change."""
    previous, _derived.values = _derived.values, {} if enabled else None
    try:
        yield
    finally:
        _derived.values = previous


def keeps_derived(x: torch.Tensor) -> bool:
    """Return whether `derive` keeps results on the device of `x`: in `keep_derived`, without autograd.

    Compiled programs and CUDA graphs compute the results at every step.
    """
    return mode() < TRANSFORMED and _derived.values is not None and not (torch.is_grad_enabled() or is_capturing(x))


def derive(owner: Hashable, name: str, x: torch.Tensor, compute: Callable[[], Any], key: Hashable = None) -> Any:
    """Return `compute()`, which depends on weights and `key`, or the kept result if `keeps_derived(x)`.

    The last result is kept for each `owner`, a module or a layer of a cache, and `name`.
    """
    if not keeps_derived(x):
        return compute()
    values: Any = _derived.values
    kept = values.get((owner, name))
    if kept is None or kept[0] != key:
        kept = values[owner, name] = key, compute()
    return kept[1]


class StateLayer(CacheLayerMixin):
    """State of one layer for B sequences: the attributes in `fields`, tensors `[B, ...]` or None."""

    # Slots, because `torch.export` treats numbers in `__dict__` as constants: a counter there would fix the length.
    # `_seen`: see `seen`. `_static`: the tensors are written in place.
    __slots__ = ("_seen", "_static")
    is_sliding = False
    supports_early_init = False
    fields: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Remove all states."""
        for name in self.fields:
            setattr(self, name, None)
        self.seen, self.is_initialized, self._static = 0, False, False

    def store(self, length: int = 0, **tensors: torch.Tensor | None) -> None:
        """Store the tensors of the state after `length` more positions, in place if the layer is static."""
        is_static = self.is_static
        for name, tensor in tensors.items():
            current = getattr(self, name) if is_static else None
            if current is None:
                setattr(self, name, tensor)
            elif tensor is not current:
                current.copy_(tensor)
        if length or not self.is_initialized:
            self.seen, self.is_initialized = self.seen + length, True

    @property
    def is_static(self) -> bool:
        """Whether the tensors keep their sizes and addresses, see `StateCache.make_static`."""
        return getattr(self, "_static", False)

    def check_room(self) -> None:
        """Raise `ValueError` if a static layer has no place for one more position."""

    def make_static(self, max_length: int | None) -> None:
        """Replace the tensors by copies, to which further positions are written in place."""
        self.map(lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))
        self._static = True

    @property
    def seen(self) -> int:
        """The number of positions so far, including padding; in an exported program 1 for any filled cache."""
        return getattr(self, "_seen", int(self.is_initialized))

    @seen.setter
    def seen(self, count: int) -> None:
        self._seen = count

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, without those that are None."""
        return {name: tensor for name in self.fields if (tensor := getattr(self, name)) is not None}

    @property
    def batch_size(self) -> int | None:
        """B, or None if the layer is empty."""
        return len(next(iter(self.tensors.values()))) if self.is_initialized else None

    def get_seq_length(self) -> int:
        """Return the number of positions so far."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of a mask that includes `query_length` new positions, and its offset."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: `store` initializes the layer."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Raise `NotImplementedError`: the state is not only keys and values."""
        raise NotImplementedError(f"a {type(self).__name__} contains more than keys and values; call `store`")

    def crop(self, max_length: int) -> None:
        """Raise `ValueError` if positions have to be removed, because a recurrence cannot be reversed.

        Args:
            max_length: the number of positions to keep, or if negative to remove.
        """
        if max_length < 0:
            max_length += self.seen
        if max_length < self.seen:
            raise ValueError(
                f"the cache cannot be cropped from {self.seen} to {max_length} positions, because its states depend "
                "on all of them; copy the cache before positions that may be removed, or compute it again"
            )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `function` to every tensor."""
        for name, tensor in self.tensors.items():
            new = function(tensor)
            if not self.is_static:
                setattr(self, name, new)
            elif new.shape == tensor.shape:
                tensor.copy_(new)
            else:
                raise ValueError(f"a static cache has a fixed batch size, {len(tensor)}, got {len(new)}; use another")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the sequences by `beam_idx`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of these indices."""
        self.map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in place."""
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class StateCache(Cache):
    """Cache of a decoder, with a `layer_class` for each layer. It is created empty, and updated in place.

    Args:
        config: configuration of the decoder.
    """

    layer_class: type[StateLayer]
    sized_by: tuple[str, ...]  # fields of the configuration that determine the sizes of the tensors
    layers: list[Any]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[self.layer_class() for _ in range(config.num_hidden_layers)])
        # The length with which `generate` makes the cache static after the prompt; None = it stays dynamic.
        self.static_length: int | None = None
        self.sizes = {name: getattr(config, name) for name in ("num_hidden_layers", *self.sized_by)}

    def check(self, config: PreTrainedConfig, inputs: torch.Tensor) -> None:
        """Raise `ValueError` unless the cache fits a model of `config` and the inputs."""
        batch, length = inputs.shape[:2]
        if self.is_static:
            if length != 1 or torch.is_grad_enabled():
                raise ValueError(
                    f"a static cache supports one position per call, without gradients, got {length}; split the input, "
                    "and call the model under torch.no_grad()"
                )
            self.layers[0].check_room()
        else:
            forbid_capture(inputs, "a cache whose tensors are replaced", "call its `make_static` after the prompt")
        self.check_sizes(config, batch)

    def check_sizes(self, config: PreTrainedConfig, batch: int) -> None:
        """Raise `ValueError` unless the cache is empty, or fits a model of `config` and B sequences."""
        # Comparing sizes would specialize an exported program on the cache of the example.
        if not self.layers[0].is_initialized or mode() == EXPORTED:
            return
        sizes = self.sizes | {"batch size": self.layers[0].batch_size}
        needed = {name: getattr(config, name) for name in self.sizes} | {"batch size": batch}
        if sizes != needed:
            differing = (f"{name} {size}, not {needed[name]}" for name, size in sizes.items() if size != needed[name])
            raise ValueError(
                f"`cache` does not fit this model and batch: it has {', '.join(differing)}; pass a new cache"
            )

    @property
    def is_static(self) -> bool:
        """Whether `make_static` was called."""
        return bool(self.layers[0].is_static)

    def make_static(self, max_length: int | None = None) -> None:
        """Fix the sizes and addresses of all tensors, so that a CUDA graph can contain a decoding step.

        Call it after the prompt. Further calls of the model have one position each and no gradient. Replays of a graph
        do not advance `get_seq_length()`.

        Args:
            max_length: greatest number of positions, with the prompt, if attention is not in chunks. The memory for
                keys and values is allocated at once.

        Raises:
            ValueError: The cache is empty, `max_length` is not a positive integer, or attention without chunks has no
                `max_length` or a longer prompt.
        """
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ValueError(f"max_length must be an integer of at least 1, got {max_length!r}")
        if not self.layers[0].is_initialized:
            raise ValueError("an empty cache cannot be static; call the model with the prompt first")
        for layer in self.layers:
            layer.make_static(max_length)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage of all tensors."""
        return sum(x.untyped_storage().nbytes() for layer in self.layers for x in layer.tensors.values())

    def detach(self) -> None:
        """Detach the states from the graph, for truncated back-propagation through time."""
        for layer in self.layers:
            layer.map(torch.Tensor.detach)


class StateSeq2SeqCache(EncoderDecoderCache):
    """Cache of a decoder with cross-attention, which contains one for self-attention and one for cross-attention.

    Args:
        config: configuration of the decoder, or of the encoder-decoder.
    """

    self_attention_class: type[StateCache]
    cross_attention_class: type[StateCache]

    def __init__(self, config: PreTrainedConfig):
        config = config.decoder_config if config.is_encoder_decoder else config
        super().__init__(self.self_attention_class(config), self.cross_attention_class(config))

    @property
    def is_static(self) -> bool:
        """Whether `make_static` was called."""
        return self._self_cache.is_static

    @property
    def static_length(self) -> int | None:
        """As in `StateCache`, of the self-attention."""
        return self._self_cache.static_length

    @static_length.setter
    def static_length(self, length: int | None) -> None:
        self._self_cache.static_length = length

    def make_static(self, max_length: int | None = None) -> None:
        """Make the cache of the self-attention static (`StateCache.make_static`). That of the source never changes."""
        self._self_cache.make_static(max_length)

    @property
    def _self_cache(self) -> StateCache:
        cache: Any = self.self_attention_cache
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of the storage of all tensors."""
        return sum(cache.nbytes for cache in split_cache(self) if cache is not None)

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: both caches implement every method."""


def split_cache(cache: Cache | None) -> tuple[StateCache | None, StateCache | None]:
    """Return the caches of the self-attention and of the cross-attention."""
    parts: Any = (cache, None)
    if isinstance(cache, EncoderDecoderCache):
        parts = cache.self_attention_cache, cache.cross_attention_cache
    return parts


def layer_caches(
    cache: StateCache | None, cross_cache: StateCache | None, count: int
) -> list[tuple[StateLayer | None, StateLayer | None]]:
    """Return the layers of both caches in pairs, for each of `count` layers; None for a cache that is None."""
    none = [None] * count
    parts = (none if part is None else part.layers for part in (cache, cross_cache))
    return list(zip(*parts, strict=True))


def new_cache(model: CommonPreTrainedModel) -> Cache:
    """Return an empty cache for the decoder of `model`, of its `cache_class` or `seq2seq_cache_class`."""
    return _cache_class(model)(model.config)


def _cache_class(model: CommonPreTrainedModel) -> Callable[[PreTrainedConfig], Cache]:
    crosses = model.config.is_encoder_decoder or model.config.add_cross_attention
    return model.seq2seq_cache_class if crosses else model.cache_class


def check_class(model: CommonPreTrainedModel, cache: Cache | None) -> None:
    """Raise `ValueError` if the class of the cache does not match the decoder of `model`."""
    kind: Any = _cache_class(model)
    if cache is not None and not isinstance(cache, kind):
        raise ValueError(
            f"`cache` must be a {kind.__name__}, got a {type(cache).__name__}; omit it for a new cache; "
            f"{_PREFIX_TUNING}"
        )


def fill_cache(model: CommonPreTrainedModel, cache: Cache) -> None:
    """Convert an empty cache that `EncoderDecoderModel.generate` created for the decoder `model` to its class."""
    if type(cache) is EncoderDecoderCache and cache.get_seq_length() == 0:
        parts = cache.self_attention_cache, cache.cross_attention_cache
        if model.config.add_cross_attention and all(type(part) is DynamicCache for part in parts):
            new: Any = new_cache(model)
            cache.__class__ = type(new)
            vars(cache).update(vars(new))


def keeps_cache(model: CommonPreTrainedModel) -> bool:
    """Return whether a decoder creates a cache by default: `config.use_cache`, except in training and export.

    With a new cache, an exported program would only support the length of the example.
    """
    return model.config.use_cache and not model.training and mode() != EXPORTED


def begin_cache(model: CommonPreTrainedModel, cache: Cache | None, use_cache: bool | None) -> Cache | None:
    """Return the cache that a forward pass of a decoder reads and updates, or None.

    Args:
        model: the model without a head.
        cache: the cache that was passed, or None.
        use_cache: whether to create a cache if `cache` is None; None = see `keeps_cache`.

    Raises:
        ValueError: An encoder has no cache, the cache is of another class, or a layer does not run exactly once.
    """
    config = model.config
    if not config.is_decoder:
        raise ValueError(
            "`cache` and `use_cache=True` require a decoder (is_decoder=True), because the outputs of an encoder "
            f"depend on later positions; omit them; {_PREFIX_TUNING}"
        )
    if cache is not None:
        fill_cache(model, cache)
    check_class(model, cache)
    if use_cache is None:
        use_cache = keeps_cache(model)
    if cache is None and use_cache:
        cache = new_cache(model)
    if cache is not None and model.training:
        checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        runs_twice = checkpoints and torch.is_grad_enabled()
        if runs_twice or getattr(config, "layerdrop", False):
            reason = "gradient checkpointing runs a layer twice" if runs_twice else "layerdrop skips layers"
            raise ValueError(f"{reason}, but a cache requires each layer to run once; pass use_cache=False")
    return cache
