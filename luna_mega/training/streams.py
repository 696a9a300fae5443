"""Training examples that are changed at random, shuffled or streamed.

Random numbers depend only on the seed, the epoch and the index of an example, not on processes or workers.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler
from transformers import TrainingArguments

from luna_mega.training.arguments import fail

Example = dict[str, Any]
Change = Callable[[Example, torch.Generator], Example]


def draw(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return a generator for one example that does not depend on other examples and processes."""
    state = np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def order_seed(training: TrainingArguments) -> int:
    """Return the seed of the order of the examples."""
    return training.seed if training.data_seed is None else training.data_seed


class Redrawn(Dataset):
    """Dataset that applies `change` to each example, with a generator seeded by seed, epoch and index."""

    def __init__(self, examples: Dataset, change: Change | None, seed: int):
        self.examples, self.change, self.seed = examples, change, seed
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()  # visible to persistent workers

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.change(self.examples[index], draw(self.seed, int(self.epoch), index))

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)


class Reseeded(Redrawn):
    """Dataset whose examples draw global random numbers, which are seeded by seed, epoch and index."""

    def __init__(self, examples: Dataset, seed: int):
        super().__init__(examples, None, seed)

    def __getitem__(self, index: int) -> Example:
        number = draw(self.seed, int(self.epoch), index).initial_seed()
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            random.seed(number)
            np.random.seed(number % 2**32)
            try:
                return self.examples[index]
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])


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


class TokenBatches:
    """Batches of examples of similar length with a maximum number of tokens, in another order in each epoch.

    As in fairseq, examples are sorted by the lengths of their sides, the first side first; the order of equal ones is
    random. A batch has as many of the next examples as possible, rounded down to a multiple of 8 if there are more.
    Accelerate gives each process complete batches, so the first ones are repeated until all have equally many.

    Attributes:
        batches: Indices of the examples of each batch.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int, processes: int, seed: int):
        """Make batches of examples with `lengths` `[N, sides]`, whose padded sides have at most `max_tokens` tokens."""
        ties = np.random.default_rng(seed).random(len(lengths))
        order = np.lexsort([ties, *lengths.T[::-1]])
        sizes = lengths.max(1)[order].tolist()
        self.batches: list[list[int]] = []
        start = 0
        while start < len(order):
            count = longest = 0
            for place in range(start, len(sizes)):
                longest = max(longest, sizes[place])
                if count and longest * (count + 1) > max_tokens:
                    break
                count += 1
            count = count // 8 * 8 or count
            self.batches.append(order[start : start + count].tolist())
            start += count
        while missing := -len(self.batches) % processes:
            self.batches += self.batches[:missing]
        self.sampler = SeededSampler(RandomSampler(self.batches), seed)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batches[number] for number in self.sampler)


def some_texts(split: datasets.Dataset | datasets.IterableDataset, column: str) -> Iterable[str]:
    """Return the texts for training a tokenizer: all, or the first 100,000 of a stream."""
    if isinstance(split, datasets.IterableDataset):
        return [row[column] for row in split.take(100_000)]
    return split[column]


class Stream(IterableDataset):
    """Infinite stream of examples, which `change` may modify, in another order in each epoch.

    If the number of files is a multiple of the number of processes, each process reads its own files. Otherwise each
    process reads all files and keeps its share, so that batches do not depend on the number of processes.
    """

    def __init__(
        self,
        examples: datasets.IterableDataset,
        change: Change | None,
        training: TrainingArguments,
        buffer_size: int,
        length: str,
    ):
        """`length` is the name of the option with the length of an example."""
        if next(iter(examples), None) is None:
            fail(f"the streamed training data have too little text for one example; reduce --{length}")
        examples = examples.shuffle(order_seed(training), buffer_size=buffer_size)
        self.rank, self.count = training.process_index, training.world_size
        self.own_files = self.count > 1 and examples.num_shards % self.count == 0
        if self.own_files:
            examples = split_dataset_by_node(examples, self.rank, self.count)
        self.examples, self.change, self.seed = examples, change, training.seed

    def __iter__(self) -> Iterator[Example]:
        position = 0
        for epoch in itertools.count():
            self.examples.set_epoch(epoch)
            start = position
            for example in self.examples:
                if self.own_files or position % self.count == self.rank:
                    index = position * self.count + self.rank if self.own_files else position
                    yield self.change(example, draw(self.seed, epoch, index)) if self.change else example
                position += 1
            if position == start:
                raise ValueError("the files of this process have too little text for one example; use fewer processes")
