"""The model without a head, as the functions see it that check and prepare its inputs."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn


class CacheOwner(Protocol):
    """A model with or without a head, whose decoder has caches of these classes."""

    config: Any
    training: bool
    cache_class: Any
    seq2seq_cache_class: Any

    def modules(self) -> Iterator[nn.Module]: ...


class Body(CacheOwner, Protocol):
    """`LunaModel`, `MegaModel` and `MegalodonModel`, one side without a head; `BodyMixin` has the defaults.

    The attributes specify which inputs the model supports:

    * `ranks`: the ranks that share the heads or columns of a layer (tensor parallelism).
    * `own_options`: keyword arguments of this model in addition to the common ones.
    * `weight_options`: keyword arguments that request attention weights.
    * `uses_positions`: whether the model uses `position_ids`; else they only mark boundaries of sequences.
    * `returns_cached_weights`: whether attention to a filled cache returns its weights.
    * `packs`: whether the model has a packed sequence P.
    * `closes_gaps`: whether layers require the kept positions of a row to follow each other, as moving averages do.
    * `has_read_types`: whether the values of a batch of token types have been checked.
    * `token_types`: the number of token types; 0 = the model has no type embeddings.
    * `input_width`: the width of `inputs_embeds`.
    """

    ranks: int
    own_options: frozenset[str]
    weight_options: tuple[str, ...]
    uses_positions: bool
    returns_cached_weights: bool
    packs: bool
    closes_gaps: bool
    has_read_types: bool

    @property
    def token_types(self) -> int: ...

    @property
    def input_width(self) -> int: ...

    def get_input_embeddings(self) -> Any: ...
