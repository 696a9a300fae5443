"""Runs on several processes and on data that do not fit: what they need beside Trainer."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch.utils.data import Dataset, IterableDataset, Sampler
from transformers import TrainerCallback, TrainingArguments

from common.arguments import check_least, fail

# What torchrun, accelerate and the launchers of MPI call the number of processes.
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

Example = dict[str, Any]
Change = Callable[[Example, torch.Generator], Example]


@dataclass
class ScaleArguments:
    """Options for large data and machines."""

    streaming: bool = field(
        default=False, metadata={"help": "read the training data as they are needed, with --max_steps"}
    )
    shuffle_buffer: int = field(default=10_000, metadata={"help": "blocks that --streaming draws the next one from"})
    peak_flops: float | None = field(
        default=None, metadata={"help": "peak of a process's device, for the utilisation; CPUs measure theirs"}
    )


def check_launch(processes: int) -> None:
    """End the script when a launcher started several processes but each would train alone, on the same data."""
    launched = max(int(os.environ.get(name) or 1) for name in WORLD_SIZES)
    if launched > 1 and processes == 1:
        if int(os.environ.get("RANK") or 0):  # the first one says it
            raise SystemExit(1)
        fail(f"{launched} processes were launched, but each would train alone: on CPUs pass --use_cpu true")


def set_timeout(training: TrainingArguments) -> None:
    """Let processes on CPUs wait for each other for `--ddp_timeout` seconds; Trainer tells accelerators only."""
    if training.world_size > 1 and training.device.type == "cpu":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=training.ddp_timeout))


def check_scale(training: TrainingArguments, scale: ScaleArguments) -> None:
    """End the script when the options for large data contradict others."""
    if not scale.streaming:
        return
    if training.do_train and training.max_steps <= 0:
        fail("--streaming needs --max_steps: how long the data are is not known")
    if training.dataloader_num_workers > 1:
        fail(f"--dataloader_num_workers {training.dataloader_num_workers}: --streaming reads in at most 1 worker")
    check_least(scale, 1, "shuffle_buffer")


def check_batch(training: TrainingArguments, split: Dataset) -> None:
    """End the script when the processes could not fill one batch without counting an example twice."""
    needed = training.train_batch_size * training.world_size
    if training.world_size > 1 and len(split) < needed:
        fail(
            f"{training.world_size} processes with --per_device_train_batch_size {training.per_device_train_batch_size}"
            f" need {needed} examples for a batch; the split train has {len(split)}"
        )


def draw(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return random numbers that depend on nothing but the example: on no other, on no process and no worker."""
    state = np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


class Redrawn(Dataset):
    """Examples that `change` alters whenever they are read, by numbers drawn from seed, epoch and index."""

    def __init__(self, examples: Dataset, change: Change, seed: int):
        self.examples, self.change, self.seed = examples, change, seed
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()  # workers that stay alive see it as well

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.change(self.examples[index], draw(self.seed, int(self.epoch), index))

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)


class SeededSampler(Sampler):
    """The order of another sampler, drawn from seed and epoch: a run that is resumed finds it again."""

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = draw(self.seed, self.epoch, 0)
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset):
    """Examples that are read as they are needed, without end: after the last one they begin anew in another order.

    Where the files of `examples` divide among the processes each reads its own. Otherwise each reads all of them and
    keeps its share, so that the batches do not depend on the number of processes.
    """

    def __init__(self, examples: datasets.IterableDataset, change: Change, training: TrainingArguments):
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
                if self.own_files:
                    yield self.change(example, draw(self.seed, epoch, position * self.count + self.rank))
                elif position % self.count == self.rank:
                    yield self.change(example, draw(self.seed, epoch, position))
                position += 1
            if position == start:
                raise ValueError("the streamed training data have no example; see --block_size")


class EpochCallback(TrainerCallback):
    """Tell data set and sampler the epoch: accelerate does not on several processes, nor in a resumed epoch."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        epoch = int(state.epoch + 1e-6)
        for part in (train_dataloader, train_dataloader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


def total(values: list[float], training: TrainingArguments) -> list[float]:
    """Return the sums of `values` over all processes."""
    if training.world_size == 1:
        return values
    sums = torch.tensor(values, dtype=torch.float64, device=training.device)
    dist.all_reduce(sums)
    return sums.tolist()
