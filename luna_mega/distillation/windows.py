"""Batches of texts, and windows of texts that are too long for a teacher."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from luna_mega.kernels.support import upcast

logger = logging.getLogger(__name__)
_TOKENS = 4096  # approximately, per batch
_SECONDS = 5  # between two lines about the progress


class Windows(NamedTuple):
    """Windows of the texts of a batch; a short text is one window."""

    owner: torch.Tensor  # `[W]`, number of the text
    columns: torch.Tensor  # `[W, T]`, columns of the tokens in the batch
    mask: torch.Tensor  # `[W, T]`, True for the tokens of a window
    counts: torch.Tensor  # `[B]`, number of windows of every text

    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the inputs of the windows `[W, T]`."""
        inputs = {name: tensor[self.owner[:, None], self.columns] for name, tensor in batch.items()}
        return inputs | {"attention_mask": self.mask.to(batch["attention_mask"])}

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the means `[B, d]`, at least in float32, of the values `[W, d]` of the windows of every text."""
        values = upcast(values)
        total = values.new_zeros(len(self.counts), values.shape[1]).index_add_(0, self.owner, values)
        return total / self.counts[:, None]


def split_windows(mask: torch.Tensor, window: int) -> Windows:
    """Split texts, of which `mask` `[B, T]` keeps the tokens, into windows.

    Every window has the first and the last token of the text, as the tokenizer adds them to a text.
    """
    pieces: list[torch.Tensor] = []
    owners: list[int] = []
    for index, kept in enumerate(mask):
        columns = kept.nonzero().flatten()
        parts = (columns,)
        if len(columns) > window:
            parts = [torch.cat([columns[:1], part, columns[-1:]]) for part in columns[1:-1].split(window - 2)]
        pieces += parts
        owners += [index] * len(parts)
    ones = [torch.ones_like(piece, dtype=torch.bool) for piece in pieces]
    columns, kept = (nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (pieces, ones))
    owner = torch.tensor(owners, device=mask.device)
    return Windows(owner, columns, kept, owner.bincount(minlength=len(mask)))


def make_batches(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int, device: torch.device | str = "cpu"
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield padded batches of texts of similar lengths, the longest first; log the progress every few seconds."""
    rows = sorted(tokenizer(list(texts), truncation=True, max_length=length)["input_ids"], key=len, reverse=True)
    total, logged = len(rows), time.monotonic()
    while rows:
        count = max(1, _TOKENS // len(rows[0]))
        yield dict(tokenizer.pad({"input_ids": rows[:count]}, return_tensors="pt").to(device))
        rows = rows[count:]
        if time.monotonic() - logged > _SECONDS:
            logger.info("  %d of %d texts", total - len(rows), total)
            logged = time.monotonic()
