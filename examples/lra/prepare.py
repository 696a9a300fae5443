"""Makes the data of Long Range Arena (Tay et al. 2021), as parquet files that `datasets` loads with their splits.

    python examples/lra/prepare.py listops --output data/listops
    python examples/lra/prepare.py pathfinder --output data/pathfinder --processes 16
    python examples/lra/prepare.py pathx --output data/pathx --processes 16
    python examples/lra/prepare.py text --source stanfordnlp/imdb --output data/text
    python examples/lra/prepare.py image --source uoft-cs/cifar10 --output data/image
    python examples/lra/prepare.py retrieval --source lra_release/tsv_data --output data/retrieval
    python examples/lra/prepare.py speech --source speech_commands_v0.02 --output data/speech

ListOps and Pathfinder are generated where no --source is given: the same files for a seed, whatever the number of
processes. Interrupted, the command goes on where it stopped. The folder has a data set card and can be pushed to the
Hub as it is.
"""

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from datasets import ClassLabel, Features, Image, Value
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as for the scripts beside this folder


from lra import drawing, listops, pathfinder, released
from lra.card import draw_sheet, write_card
from lra.shards import SHARD_ROWS, Folder, make_splits

TEXT, TWO = Value("string"), ClassLabel(num_classes=2)
OBJECTS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PICTURE = {"image": Image(), "label": ClassLabel(names=["two snakes", "one snake"])}
# Of every task the columns, the title and text of its card.
TASKS = {
    "listops": (
        {"source": TEXT, "label": ClassLabel(names=list(listops.DIGITS))},
        "ListOps",
        "Trees of operations on digits (`source`: tokens with spaces between them, all brackets among them) and their "
        "values (`label`).",
    ),
    "text": ({"text": TEXT, "label": ClassLabel(names=["neg", "pos"])}, "Text", "Film reviews, to be read as bytes."),
    "retrieval": ({"text1": TEXT, "text2": TEXT, "label": TWO}, "Retrieval", "Pairs of texts, to be read as bytes."),
    "image": ({"image": Image(), "label": ClassLabel(names=OBJECTS)}, "Image", "CIFAR-10 in grey."),
    "pathfinder": (PICTURE, "Pathfinder", "Dashed snakes; `label` 1: the two discs are the ends of one snake."),
    "pathx": (PICTURE, "Path-X", "Dashed snakes; `label` 1: the two discs are the ends of one snake."),
    "speech": (
        {"audio": Value("binary"), "sampling_rate": Value("int64"), "label": ClassLabel(names=list(released.SC10))},
        "Raw speech",
        "Spoken words: 16-bit samples, and how many make a second.",
    ),
}
GENERATED = {"listops": (96_000, 2_000, 2_000), "pathfinder": (160_000, 20_000, 20_000)}
GENERATED["pathx"] = GENERATED["pathfinder"]
VALIDATION = {"text": 2_500, "image": 5_000}
SPLITS = ("train", "validation", "test")


def fail(message: object) -> NoReturn:
    """End the script with one line and exit status 1."""
    raise SystemExit(f"error: {message}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK", help=", ".join(TASKS))
    for task in TASKS:
        options = tasks.add_parser(task, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        options.add_argument("--output", type=Path, required=True, help="folder for the files")
        made, add = task in GENERATED, partial(options.add_argument, type=int, metavar="N")
        where = "Hub name or folder" if task in (*VALIDATION, "speech") else "folder"
        options.add_argument(
            "--source", required=not made, help=f"{where} to convert" + "; without it rows are made" * made
        )
        if made or task in VALIDATION:
            add("--seed", default=0, help="seed of all random draws")
        if made:
            add("--processes", default=os.cpu_count(), help="that make rows")
            for split, size in zip(SPLITS, GENERATED[task], strict=True):
                add(f"--{split}", default=size, help="rows of this split")
        elif task in VALIDATION:
            add("--validation", default=VALIDATION[task], help="rows drawn from those to train on")
        if task == "listops":
            for name, value in vars(listops.Shape()).items():
                add(f"--{name}", default=value, help="limit of the trees")
        elif made:
            add("--size", default=128 if task == "pathx" else 32, help=f"side in pixels: {drawing.SIZES}")
            add("--contour_length", default=14, help=f"paddles: {drawing.CONTOUR_LENGTHS}")
        elif task == "speech":
            options.add_argument("--words", nargs="+", default=list(released.SC10), help="classes")
            add("--sampling_rate", default=16_000, help="samples a second of the clips")
    arguments = parser.parse_args(argv)
    for name, least in (("seed", 0), ("processes", 1), *((split, 0) for split in SPLITS)):
        if getattr(arguments, name, least) < least:
            fail(f"--{name} {getattr(arguments, name)} must be at least {least}")
    return arguments


def generate(arguments: argparse.Namespace, features: Features) -> tuple[Folder, dict[str, int]]:
    """Make the rows of ListOps or Pathfinder."""
    sizes = {split: getattr(arguments, split) for split in SPLITS}
    if not any(sizes.values()):
        fail("one of --train, --validation and --test must be above 0")
    if arguments.task == "listops":
        limits = {name: getattr(arguments, name) for name in vars(listops.Shape())}
        make, unique = partial(listops.make_batch, arguments.seed, listops.Shape(**limits)), "source"
    else:
        limits = {"size": arguments.size, "contour_length": arguments.contour_length}
        make, unique = partial(pathfinder.make_batch, arguments.seed, drawing.find_drawing(**limits)), None
    folder = Folder(arguments.output, {"task": arguments.task, "seed": arguments.seed, **sizes, **limits})
    make_splits(folder, sizes, make, features, unique, arguments.processes)
    return folder, sizes


def convert(arguments: argparse.Namespace, features: Features) -> tuple[Folder, dict[str, int]]:
    """Convert the rows of a source."""
    task, source = arguments.task, arguments.source
    request = {"task": task, "source": source}
    if task in VALIDATION:
        request |= {"validation": arguments.validation, "seed": arguments.seed}
        read = {"text": released.read_reviews, "image": released.read_objects}[task]
        splits = read(source, arguments.validation, arguments.seed)
    elif task == "speech":
        request |= {"words": arguments.words, "sampling_rate": arguments.sampling_rate}
        splits = released.read_speech(source, arguments.words, arguments.sampling_rate)
        features["label"] = ClassLabel(names=arguments.words)
    elif task == "listops":
        splits = released.read_listops(Path(source))
    elif task == "retrieval":
        splits = released.read_pairs(Path(source))
    else:
        request["size"] = arguments.size
        splits = released.read_pathfinder(Path(source), arguments.size)
    folder = Folder(arguments.output, request)
    for split, (count, row) in splits.items():
        shards = -(-count // SHARD_ROWS)
        for shard in tqdm(range(shards), desc=split, unit="file"):
            name = f"{split}-{shard:05d}-of-{shards:05d}.parquet"
            if not folder.whole(name):
                numbers = range(shard * SHARD_ROWS, min((shard + 1) * SHARD_ROWS, count))
                folder.write(name, [row(number) for number in numbers], features)
    return folder, {split: count for split, (count, _) in splits.items()}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    columns, title, text = TASKS[arguments.task]
    try:
        folder, sizes = (convert if arguments.source else generate)(arguments, Features(columns))
        if "image" in columns:
            text = f"{text}\n\n{draw_sheet(folder, Features(columns)['label'].names)}"
    except (OSError, ValueError) as error:
        fail(error)
    command = shlex.join(["python", "examples/lra/prepare.py", *(argv or sys.argv[1:])])
    write_card(folder, arguments.task, title, text, command, sizes)


if __name__ == "__main__":
    main()
