"""Splits made batch by batch in several processes, in parquet files that are whole or absent.

A batch depends on its split and its number alone, so that the files do not depend on the number of processes, nor on
how often the work was interrupted. `prepare.json` in the folder says what was asked for and which files are whole.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import Dataset, Features
from tqdm import tqdm

Rows = list[dict[str, Any]]
# The number of a split is a part of its seed. What others are compared with comes first, so that it does not depend on
# how much there is to train on.
SPLITS = ("test", "validation", "train")
SHARD_ROWS = 1024
MANIFEST = "prepare.json"


class Folder:
    """The output folder and its list of whole files. `ValueError` where it holds something else."""

    def __init__(self, path: Path, request: dict[str, Any]):
        self.path, self.manifest = path, path / MANIFEST
        path.mkdir(parents=True, exist_ok=True)
        if self.manifest.exists():
            try:
                self.content = json.loads(self.manifest.read_text(encoding="utf-8-sig"))
                held = self.content["request"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.manifest} cannot be read ({error}); choose another --output") from error
            differing = sorted(name for name in held | request if held.get(name) != request.get(name))
            if differing:
                asked = ", ".join(f"{name} {held.get(name)} and not {request.get(name)}" for name in differing)
                raise ValueError(f"{path} was begun with {asked}; choose another --output")
        elif any(path.iterdir()):
            raise ValueError(f"{path} holds other files; choose another --output")
        else:
            self.content = {"request": request, "files": {}}
            self._save()

    def whole(self, name: str) -> dict[str, Any] | None:
        """Return what is known of a file that is there and as it was written; None where it must be made."""
        known = self.content["files"].get(name)
        return (
            known if known and (self.path / name).exists() and checksum(self.path / name) == known["sha256"] else None
        )

    def write(self, name: str, rows: Rows, features: Features, **known: Any) -> None:
        """Write a parquet file under another name, and rename it when it is whole."""
        temporary = self.path / f"{name}.part"
        Dataset.from_list(rows, features=features).to_parquet(temporary)
        os.replace(temporary, self.path / name)
        self.content["files"][name] = {"rows": len(rows), "sha256": checksum(self.path / name), **known}
        self._save()

    def _save(self) -> None:
        temporary = self.manifest.with_suffix(".part")
        temporary.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.manifest)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_splits(
    folder: Folder,
    sizes: dict[str, int],
    make: Callable[[int, int], Rows],
    features: Features,
    unique: str | None = None,
    processes: int = 1,
) -> None:
    """Write `train`, `validation` and `test`, or go on with them.

    Args:
        folder: where to; it is asked which files are whole.
        sizes: rows of each split.
        make: returns the rows of (number of the split, number of the batch); picklable.
        features: of the columns.
        unique: column in which no value may come twice, in all splits together.
        processes: that call `make`.
    """
    seen: set[str] = set()
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) if processes > 1 else None
    with pool or nullcontext(), tqdm(total=sum(sizes.values()), unit="row", smoothing=0.05) as bar:
        for number, split in enumerate(SPLITS):
            shards, batch, batches = -(-sizes[split] // SHARD_ROWS), 0, None
            for shard in range(shards):
                name = f"{split}-{shard:05d}-of-{shards:05d}.parquet"
                count = min(SHARD_ROWS, sizes[split] - shard * SHARD_ROWS)
                if known := folder.whole(name):
                    batch, batches = known["next_batch"], None
                    if unique:
                        seen.update(pq.read_table(folder.path / name, columns=[unique])[unique].to_pylist())
                    bar.update(count)
                    continue
                if batches is None:
                    batches = _batches(partial(make, number), batch, pool, 2 * processes)
                rows: Rows = []
                while len(rows) < count:
                    batch, made = next(batches)
                    # The rest of the last batch is left out, so that every file begins with a whole one.
                    for row in made:
                        if len(rows) < count and (unique is None or row[unique] not in seen):
                            rows.append(row)
                            if unique:
                                seen.add(row[unique])
                            bar.update()
                folder.write(name, rows, features, next_batch=batch + 1)


def _batches(
    make: Callable[[int], Rows], first: int, pool: ProcessPoolExecutor | None, ahead: int
) -> Iterator[tuple[int, Rows]]:
    """Yield the numbers of batches, from `first` on, and their rows, which a few processes make ahead of time."""
    numbers = itertools.count(first)
    if pool is None:
        yield from ((number, make(number)) for number in numbers)
        return
    waiting = deque()
    try:
        while True:
            while len(waiting) < ahead:
                number = next(numbers)
                waiting.append((number, pool.submit(make, number)))
            number, future = waiting.popleft()
            yield number, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
