"""Random changes of examples that depend only on the seed, the epoch and the index, not on processes or workers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

Example = dict[str, Any]
Change = Callable[[Example, torch.Generator], Example]


def draw(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return a generator for one example that does not depend on other examples and processes."""
    state = np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


class Redrawn(Dataset):
    """Dataset that applies `change` to each example, with a generator seeded by seed, epoch and index."""

    def __init__(self, examples: Dataset, change: Change, seed: int):
        self.examples, self.change, self.seed = examples, change, seed
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()  # visible to persistent workers

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.change(self.examples[index], draw(self.seed, int(self.epoch), index))

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)


class SeededSampler(Sampler):
    """Sampler that draws the order of another sampler from seed and epoch, so that resumed runs reproduce it."""

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = draw(self.seed, self.epoch, 0)
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
