"""Streamed training data, and how it is distributed over processes."""

import itertools
from collections.abc import Iterable, Iterator

import datasets
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments

from luna_mega.training.arguments import fail
from luna_mega.training.runs import OrderedTrainer
from luna_mega.training.seeded import Change, Example, draw


def some_texts(split: Dataset | datasets.IterableDataset, column: str) -> Iterable[str]:
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
        self, examples: datasets.IterableDataset, change: Change | None, training: TrainingArguments, buffer_size: int
    ):
        if next(iter(examples), None) is None:
            fail("the streamed training data have too little text for one example; reduce --block_size")
        examples = examples.shuffle(training.seed, buffer_size=buffer_size)
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


class StreamingTrainer(OrderedTrainer):
    """Trainer that supports a `Stream` as training data."""

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, Stream):
            return super().get_train_dataloader()
        # The stream is already distributed; Accelerate would distribute it again.
        options = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=collator, **options)
