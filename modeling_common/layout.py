"""`TokenLayout`: where the tokens of a batch are. transformers' words for sequences laid end to end end here.

A batch `[B, T]` is dense, one sequence a row, filled up with padding that a mask excludes; or it is ragged: its
sequences are laid end to end, `[1, total, ...]`, and nothing is computed for padding. Layers, norms, dropout and
pooling take a layout in place of a mask, and ops its `options`.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard, all_gather
from luna_mega.kernels.varlen import check, locate

# Keyword arguments that tell how sequences are laid end to end, as `DataCollatorWithFlattening` makes them.
RAGGED_OPTIONS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


class TokenLayout(NamedTuple):
    """A dense batch with its mask, or the bounds of ragged sequences.

    It is a tuple because libraries that spread a model over devices move the tensors of tuples.

    Args:
        mask: `[B, T]` bool, True = keep, of a dense batch; None = all are kept.
        cu_seqlens: `[S + 1]`, the bounds of S ragged sequences; None = dense.
        max_seqlen: the length of the longest of them.
        places: `[total]`, the places of their tokens in the batch flattened; None = all places in their order.
        shape: `(B, T)` of the batch that was made ragged.
        grid: rows and columns of patches, of pictures of another size than the model's position tables.
        shard: the parts of the sequences that the ranks of a group hold, of which the T positions here are one (see
            `share`); None = the sequences are whole.
        kept: `[ranks, B]`, the number of tokens that each rank keeps; None = all are kept, or there is no shard.
        first: `[B]`, the first column that is kept, counted over all ranks.
    """

    mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    places: torch.Tensor | None = None
    shape: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None
    shard: ContextShard | None = None
    kept: torch.Tensor | None = None
    first: torch.Tensor | None = None

    def share(self, shard: ContextShard, batch: int, device: torch.device) -> "TokenLayout":
        """Return the layout of this rank's dense part of B sequences; all ranks tell each other what they keep.

        What they tell each other has the size B, whatever the length.
        """
        mine = torch.tensor([shard.lengths[shard.rank], 0], device=device).expand(batch, 2)
        if self.mask is not None:
            mine = torch.stack([self.mask.sum(dim=1), self.mask.int().argmax(dim=1)], dim=1)
        kept, first = all_gather(mine, shard).unbind(dim=-1)
        lengths = torch.tensor(shard.lengths, device=device)[:, None]
        first = first + lengths.cumsum(dim=0) - lengths
        first = first.gather(0, (kept > 0).int().argmax(dim=0, keepdim=True))[0]
        if kept.device.type == "cpu" and (kept == lengths).all():
            kept = None
        return self._replace(shard=shard, kept=kept, first=first)

    def is_ragged(self) -> bool:
        """Return whether sequences are laid end to end."""
        return self.cu_seqlens is not None

    def options(self, mask: str = "mask") -> dict[str, Any]:
        """Return the keyword arguments that an op takes the layout by; `mask` is the name of its mask."""
        if self.cu_seqlens is not None:
            return {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}
        return {mask: self.mask} if self.shard is None else {mask: self.mask, "shard": self.shard}

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[B, T, ...]` as layers take it: as it is, or `[1, total, ...]`."""
        if self.cu_seqlens is None:
            return x
        x = x.flatten(0, 1)
        return (x if self.places is None else x[self.places])[None]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return what layers made as `[B, T, ...]`, with zeros where no token of a ragged sequence was."""
        if self.cu_seqlens is None:
            return x
        if self.places is None:
            return x[0].unflatten(0, self.shape)
        batch, length = self.shape
        rows = x.new_zeros(batch * length, *x.shape[2:])
        return rows.index_copy(0, self.places, x[0]).unflatten(0, self.shape)

    def clear_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[B, T, ...]` with zeros at padding."""
        return x if self.mask is None else x.masked_fill(~self.mask[..., None], 0.0)

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        """Return the number of sequences in `x` `[B, T, ...]` or `[1, total, ...]`, and the length of the longest.

        It is that of whole sequences where `x` has the part of this rank.
        """
        if self.cu_seqlens is None:
            return x.shape[0], x.shape[1] if self.shard is None else self.shard.total
        return len(self.cu_seqlens) - 1, self.max_seqlen

    def counts(self) -> torch.Tensor | None:
        """Return how many tokens each sequence has, `[B, 1]`, on all ranks together; None = all are kept."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff()[:, None]
        if self.shard is not None:
            return None if self.kept is None else self.kept.sum(dim=0)[:, None]
        return None if self.mask is None else self.mask.sum(dim=1, keepdim=True)

    def start(self) -> torch.Tensor | None:
        """Return the position of the first column in each sequence, `[B]`: below 0 where padding comes first.

        On a later rank it is how far the sequence has got. None = every sequence begins in the first column.
        """
        if self.shard is not None:
            return self.shard.start - self.first
        return None if self.mask is None else -self.mask.int().argmax(dim=1)

    def before(self) -> torch.Tensor:
        """Return how many tokens of each sequence earlier ranks keep, `[B]`."""
        if self.kept is None:
            return torch.full_like(self.first, self.shard.start)
        return self.kept[: self.shard.rank].sum(dim=0)

    def locate(self, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequence of every ragged token and its position in there, `[total]` each."""
        return locate(self.cu_seqlens, total)


DENSE = TokenLayout()  # no padding


def drop_if_full(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return None in place of a bool mask that keeps everything, so that nothing is masked, moved or counted for it.

    Only where finding out is free: on a CPU, and not while the model is traced, compiled or exported.
    """
    if type(mask) is not torch.Tensor or mask.device.type != "cpu" or _is_program():
        return mask
    return None if mask.all() else mask


def find_layout(
    shape: tuple[int, int],
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    options: dict[str, Any],
    unpad: bool,
) -> TokenLayout:
    """Return the layout of a batch `[B, T]` with a bool mask.

    A batch is ragged where `options` has the `cu_seq_lens_q` or the `seq_idx` of `DataCollatorWithFlattening`, or where
    `position_ids` do not rise within a row. With `unpad` a batch that is not loses the padding that `mask` tells.
    Compiled programs look at `cu_seq_lens_q` alone, as the others are values.

    Raises:
        ValueError: `cu_seq_lens_q` does not rise from 0 to B T, or another argument contradicts it.
    """
    cu_seqlens, starts = _bounds(options), None
    if not _is_program():
        if options.get("seq_idx") is not None:
            starts = options["seq_idx"].diff(dim=1) != 0
        elif position_ids is not None:
            starts = position_ids.diff(dim=1) <= 0
    if cu_seqlens is not None:
        longest = check("a ragged batch", cu_seqlens, options.get("max_length_q"), shape[0] * shape[1])
        if starts is not None and starts.device.type == "cpu" and (starts != _starts(cu_seqlens, shape)[:, 1:]).any():
            raise ValueError("seq_idx or position_ids tell other sequences than cu_seq_lens_q: leave out what is wrong")
        return TokenLayout(None, cu_seqlens, longest, None, tuple(shape))
    if starts is not None and starts.any():
        return _lay_end_to_end(mask, nn.functional.pad(starts, (1, 0), value=True).expand(shape))
    if unpad and mask is not None and not _is_program():
        return _lay_end_to_end(mask, torch.arange(shape[1], device=mask.device).expand(shape) == 0)
    return TokenLayout(mask)


def _is_program() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _bounds(options: dict[str, Any]) -> torch.Tensor | None:
    """Return `cu_seq_lens_q` or None, and refuse other bounds of keys, and lengths without bounds."""
    cu_seqlens, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
    others = {name: options.get(name) for name in ("cu_seq_lens_k", "max_length_q", "max_length_k")}
    if cu_seqlens is None:
        if named := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{', '.join(named)} without cu_seq_lens_q: pass that as well, or leave them out")
        return None
    keys = others["cu_seq_lens_k"]
    if keys is not None and keys is not cu_seqlens:
        told = keys.device.type == "cpu" and cu_seqlens.device.type == "cpu" and not _is_program()
        if keys.shape != cu_seqlens.shape or (told and (keys != cu_seqlens).any()):
            raise ValueError("cu_seq_lens_k differs from cu_seq_lens_q, but tokens attend to their own sequence")
    if (keys := others["max_length_k"]) not in (None, longest):
        raise ValueError(f"max_length_k is {keys} and max_length_q {longest}, but tokens attend to their own sequence")
    return cu_seqlens


def _starts(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return `[B, T]` bool, True where a sequence begins."""
    starts = cu_seqlens.new_zeros(shape[0] * shape[1] + 1, dtype=torch.bool)
    return starts.index_fill(0, cu_seqlens.long(), True)[:-1].view(shape)


def _lay_end_to_end(mask: torch.Tensor | None, starts: torch.Tensor) -> TokenLayout:
    """Return the ragged layout of the tokens that `mask` `[B, T]` keeps; `starts` `[B, T]` is True where one begins.

    This waits for the device, which counts the tokens.
    """
    sequence, places = starts.flatten().cumsum(dim=0) - 1, None
    count = int(sequence[-1]) + 1
    if mask is not None:
        places = mask.flatten().nonzero()[:, 0]
        sequence = sequence[places]
    lengths = torch.bincount(sequence, minlength=count)
    cu_seqlens = nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return TokenLayout(None, cu_seqlens, int(lengths.max()), places, tuple(starts.shape))


def refuse_ragged(
    model: object, inputs: torch.Tensor, position_ids: torch.Tensor | None, options: dict[str, Any]
) -> None:
    """Raise `ValueError` for a ragged batch where every row of `inputs` `[B, T, ...]` gets one label."""
    if find_layout(inputs.shape[:2], None, position_ids, options, unpad=False).is_ragged():
        raise ValueError(f"{type(model).__name__} needs one sequence a row: pad the batch, do not lay it end to end")
