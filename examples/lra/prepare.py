"""Generate or convert the data of Long Range Arena (Tay et al. 2021) as parquet files with a dataset card.

    python examples/lra/prepare.py listops --output_dir data/listops
    python examples/lra/prepare.py pathfinder --output_dir data/pathfinder --processes 16
    python examples/lra/prepare.py pathx --output_dir data/pathx --processes 16
    python examples/lra/prepare.py text --source stanfordnlp/imdb --output_dir data/text
    python examples/lra/prepare.py image --source uoft-cs/cifar10 --output_dir data/image
    python examples/lra/prepare.py retrieval --source lra_release/tsv_data --output_dir data/retrieval
    python examples/lra/prepare.py speech --source speech_commands_v0.02 --output_dir data/speech

ListOps and Pathfinder are generated unless --source is given. The rows depend on --seed only, not on the number of
processes. `load_dataset(FOLDER)` loads the splits, and the folder can be pushed to the Hub.
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, Value, concatenate_datasets
from datasets.exceptions import DatasetsError
from huggingface_hub import DatasetCard, DatasetCardData

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lra import drawing, listops, pathfinder, released
from lra.released import SPLITS
from luna_mega import training as lib

TEXT, TWO = Value("string"), ClassLabel(num_classes=2)
OBJECTS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SNAKES = {"image": Image(), "label": ClassLabel(names=["two snakes", "one snake"])}
# Columns, title and description of each task.
TASKS = {
    "listops": (
        {"source": TEXT, "label": ClassLabel(names=list(listops.DIGITS))},
        "ListOps",
        "Trees of operations on digits (`source`: tokens and brackets separated by spaces) and their values (`label`).",
    ),
    "text": ({"text": TEXT, "label": ClassLabel(names=["neg", "pos"])}, "Text", "Movie reviews, read as bytes."),
    "retrieval": ({"text1": TEXT, "text2": TEXT, "label": TWO}, "Retrieval", "Pairs of texts, read as bytes."),
    "image": ({"image": Image(), "label": ClassLabel(names=OBJECTS)}, "Image", "CIFAR-10 in gray."),
    "pathfinder": (SNAKES, "Pathfinder", "Dashed snakes; `label` 1: the two discs are the ends of one snake."),
    "pathx": (SNAKES, "Path-X", "Dashed snakes; `label` 1: the two discs are the ends of one snake."),
    "speech": (
        {"audio": Value("binary"), "sampling_rate": Value("int64"), "label": ClassLabel(names=list(released.SC10))},
        "Raw speech",
        "Spoken words: 16-bit samples and their rate in Hz.",
    ),
}
GENERATED = {"listops": (96_000, 2_000, 2_000), "pathfinder": (160_000, 20_000, 20_000)}
GENERATED["pathx"] = GENERATED["pathfinder"]
VALIDATION = {"text": 2_500, "image": 5_000}
# Reader of the source of each other task, and the options that it requires.
READERS = {
    "listops": (released.read_listops,),
    "retrieval": (released.read_pairs,),
    "pathfinder": (released.read_pathfinder, "size"),
    "pathx": (released.read_pathfinder, "size"),
    "speech": (released.read_speech, "words", "sampling_rate"),
}
CARD = """---
{{ card_data }}
---

# {{ title }}

{{ text }}

Created by an example of luna-mega:

```bash
{{ command }}
```

| split | rows |
|---|---|
{% for split, rows in sizes.items() %}| {{ split }} | {{ "{:,}".format(rows) }} |
{% endfor %}"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK", help=", ".join(TASKS))
    for task in TASKS:
        options = tasks.add_parser(task, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        options.add_argument("--output_dir", type=Path, required=True, help="output folder")
        made, add = task in GENERATED, partial(options.add_argument, type=int, metavar="N")
        place = "Hub name or folder" if task in (*VALIDATION, "speech") else "folder"
        options.add_argument(
            "--source", required=not made, help=f"{place} to convert" + "; default: generate the rows" * made
        )
        if made or task in VALIDATION:
            add("--seed", default=0, help="seed of all random draws")
        if made:
            add("--processes", default=os.cpu_count(), help="number of processes that generate rows")
            for split, size in zip(SPLITS, GENERATED[task], strict=True):
                add(f"--{split}", default=size, help="rows of this split")
        elif task in VALIDATION:
            add("--validation", default=VALIDATION[task], help="training rows that form the validation split")
        if task == "listops":
            for name, value in vars(listops.Shape()).items():
                add(f"--{name}", default=value, help="limit of the trees")
        elif made:
            add("--size", default=128 if task == "pathx" else 32, help=f"side in pixels: {drawing.SIZES}")
            add("--contour_length", default=14, help=f"paddles: {drawing.CONTOUR_LENGTHS}")
        elif task == "speech":
            options.add_argument("--words", nargs="+", default=list(released.SC10), help="classes")
            add("--sampling_rate", default=16_000, help="sampling rate of the clips in Hz")
    arguments = parser.parse_args(argv)
    lib.check_no_file("output_dir", arguments.output_dir)
    lib.check_no_file("source", arguments.source or "")
    for name, least in (("seed", 0), ("processes", 1), *((split, 0) for split in SPLITS)):
        if getattr(arguments, name, least) < least:
            lib.fail(f"--{name} {getattr(arguments, name)} must be at least {least}")
    return arguments


def make_rows(make: Callable[[int], list[dict[str, Any]]], batches: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of some batches; `datasets` distributes the list over processes."""
    for batch in batches:
        yield from make(batch)


def generate(arguments: argparse.Namespace, features: Features, cache: str) -> dict[str, Dataset]:
    """Generate the rows of ListOps, without duplicates, or of Pathfinder."""
    if not any(getattr(arguments, split) for split in SPLITS):
        lib.fail("one of --train, --validation and --test must be above 0")
    if arguments.task == "listops":
        module, limits = listops, listops.Shape(**{name: getattr(arguments, name) for name in vars(listops.Shape())})
    else:
        module, limits = pathfinder, drawing.find_drawing(arguments.size, arguments.contour_length)
    splits, seen = {}, set()
    # The number of a split is part of its seed. The test rows come first, so that they do not depend on the others.
    for number, split in enumerate(reversed(SPLITS)):
        make, size = partial(module.make_batch, arguments.seed, limits, number), getattr(arguments, split)
        parts, rows, done = [], 0, 0
        while rows < size:
            batches = list(range(done, done + math.ceil((size - rows) / module.BATCH)))
            options = {"num_proc": min(arguments.processes, len(batches)), "split": split}
            work = {"make": make, "batches": batches}
            part = Dataset.from_generator(make_rows, features, cache, gen_kwargs=work, **options)
            if module is listops:
                sources = enumerate(part["source"])
                part = part.select([index for index, row in sources if row not in seen and not seen.add(row)])
            parts, rows, done = [*parts, part], rows + len(part), done + len(batches)
        if parts:
            splits[split] = concatenate_datasets(parts).take(size)
    return splits


def convert(arguments: argparse.Namespace, features: Features, cache: str) -> dict[str, Dataset]:
    """Convert the rows of a source."""
    task, source = arguments.task, arguments.source
    if task in VALIDATION:
        column = {"text": "text", "image": "img"}[task]
        splits = released.load(source, column, "label", splits=("train", "test"))
        validation, train = arguments.validation, splits["train"]
        if not 0 <= validation < len(train):
            raise ValueError(f"--validation {validation} must be below the {len(train)} training rows")
        # Sources are often sorted by label.
        order = np.random.default_rng(arguments.seed).permutation(len(train))
        splits |= {"train": train.select(order[validation:]), "validation": train.select(order[:validation])}
        if task == "text":
            return {name: rows.select_columns([column, "label"]).cast(features) for name, rows in splits.items()}

        def gray(row: dict[str, Any]) -> dict[str, Any]:
            return {"image": row[column].convert("L"), "label": row["label"]}

        return {
            name: rows.map(gray, remove_columns=rows.column_names, features=features) for name, rows in splits.items()
        }
    if task == "speech":
        features["label"] = ClassLabel(names=arguments.words)
    reader, *names = READERS[task]
    read = partial(reader, source, **{name: getattr(arguments, name) for name in names})
    return {
        split: Dataset.from_generator(read, features, cache, gen_kwargs={"split": split}, split=split)
        for split in SPLITS
    }


def save(splits: dict[str, Dataset], task: str, command: str, output: Path) -> None:
    """Write the splits and a dataset card."""
    _, title, text = TASKS[task]
    for split, rows in splits.items():
        rows.to_parquet(output / f"{split}-00000-of-00001.parquet")
    sizes = {split: len(splits[split]) for split in SPLITS if split in splits}
    files = [{"split": split, "path": f"{split}-*.parquet"} for split in sizes]
    data = DatasetCardData(
        configs=[{"config_name": "default", "data_files": files}], tags=["long-range-arena", task], pretty_name=title
    )
    card = DatasetCard.from_template(data, template_str=CARD, title=title, text=text, command=command, sizes=sizes)
    card.save(output / "README.md")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    output, features = arguments.output_dir, Features(TASKS[arguments.task][0])
    if output.is_dir() and any(output.iterdir()):
        lib.fail(f"{output} contains other files; choose another --output_dir")
    command = shlex.join(["python", "examples/lra/prepare.py", *(argv or sys.argv[1:])])
    with lib.one_line("", DatasetsError), TemporaryDirectory() as cache:
        splits = (convert if arguments.source else generate)(arguments, features, cache)
        output.mkdir(parents=True, exist_ok=True)
        save(splits, arguments.task, command, output)


if __name__ == "__main__":
    main()
