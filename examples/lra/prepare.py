"""Makes the data of Long Range Arena (Tay et al. 2021), as parquet files that `datasets` loads with their splits.

    python examples/lra/prepare.py listops --output data/listops
    python examples/lra/prepare.py pathfinder --output data/pathfinder --processes 16
    python examples/lra/prepare.py pathx --output data/pathx --processes 16
    python examples/lra/prepare.py listops --source lra_release/listops-1000 --output data/listops
    python examples/lra/prepare.py pathfinder --source lra_release/pathfinder32/curv_contour_length_14 --output data/pf

Without --source the rows are generated: the same files for a seed, whatever the number of processes. Interrupted, the
command goes on where it stopped. The folder has a data set card and can be pushed to the Hub as it is.
"""

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from datasets import ClassLabel, Features, Image as ImageFeature, Value
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as for the scripts beside this folder


from lra import listops, pathfinder, released  # noqa: E402
from lra.card import draw_sheet, write_card  # noqa: E402
from lra.shards import SHARD_ROWS, Folder, make_splits  # noqa: E402

LISTOPS = Features({"source": Value("string"), "label": ClassLabel(names=list(listops.DIGITS))})
PATHFINDER = Features({"image": ImageFeature(), "label": ClassLabel(names=["two snakes", "one snake"])})
SIZES = {"listops": {"train": 96_000, "validation": 2_000, "test": 2_000}}
SIZES["pathfinder"] = SIZES["pathx"] = {"train": 160_000, "validation": 20_000, "test": 20_000}
TEXTS = {
    "listops": (
        "ListOps",
        "Trees of operations on digits (`source`: tokens with spaces between them, all brackets among them) and their "
        "values (`label`), as in Long Range Arena.",
    ),
    "pathfinder": (
        "Pathfinder",
        "Pictures of dashed snakes; `label` 1: the two discs are the ends of one snake. As in Long Range Arena.",
    ),
}
TEXTS["pathx"] = ("Path-X", TEXTS["pathfinder"][1])


def fail(message: object) -> NoReturn:
    """End the script with one line and exit status 1."""
    raise SystemExit(f"error: {message}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK", help=", ".join(SIZES))
    for task, sizes in SIZES.items():
        options = tasks.add_parser(task, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        options.add_argument("--output", type=Path, required=True, help="folder for the files")
        options.add_argument("--seed", type=int, default=0, help="of all that is drawn")
        options.add_argument("--source", type=Path, help="folder of lra_release to convert; without it rows are made")
        options.add_argument("--processes", type=int, default=os.cpu_count(), help="that make rows")
        for split, size in sizes.items():
            options.add_argument(f"--{split}", type=int, default=size, metavar="N", help="rows of this split")
        if task == "listops":
            for name, value in vars(listops.Shape()).items():
                options.add_argument(f"--{name}", type=int, default=value, metavar="N", help="limit of the trees")
        else:
            size = 128 if task == "pathx" else 32
            options.add_argument("--size", type=int, default=size, help=f"side in pixels: {pathfinder.SIZES}")
            options.add_argument(
                "--contour_length", type=int, default=14, help=f"paddles: {pathfinder.CONTOUR_LENGTHS}"
            )
    arguments = parser.parse_args(argv)
    arguments.sizes = {split: getattr(arguments, split) for split in SIZES[arguments.task]}
    if min(arguments.sizes.values()) < 0 or not any(arguments.sizes.values()):
        fail("--train, --validation and --test must be at least 0, and one of them above 0")
    if arguments.seed < 0 or arguments.processes < 1:
        fail("--seed must be at least 0, --processes at least 1")
    return arguments


def copy_released(folder: Folder, arguments: argparse.Namespace) -> dict[str, int]:
    """Convert the released files, and return the rows of the splits."""
    if arguments.task == "listops":
        rows = {split: list(released.read_listops(arguments.source, split)) for split in arguments.sizes}
        features = LISTOPS
    else:
        found, empty = released.read_pathfinder(arguments.source, arguments.size)
        for path in empty:
            print(f"left out, it is empty: {path}")
        rows, features = found, PATHFINDER
    for split, examples in rows.items():
        shards = -(-len(examples) // SHARD_ROWS)
        for shard in tqdm(range(shards), desc=split, unit="file"):
            some = examples[shard * SHARD_ROWS : (shard + 1) * SHARD_ROWS]
            if features is PATHFINDER:
                some = [
                    {"image": {"bytes": released.read_picture(path), "path": None}, "label": label}
                    for path, label in some
                ]
            folder.write(f"{split}-{shard:05d}-of-{shards:05d}.parquet", some, features)
    return {split: len(examples) for split, examples in rows.items()}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    names = {"task", "seed", *(["source"] if arguments.source else arguments.sizes)}
    try:
        if arguments.task == "listops":
            shape = listops.Shape(**{name: getattr(arguments, name) for name in vars(listops.Shape())})
            make, features, unique = partial(listops.make_batch, arguments.seed, shape), LISTOPS, "source"
            names |= set() if arguments.source else vars(shape).keys()
        else:
            sizes = pathfinder.drawing(arguments.size, arguments.contour_length)
            make, features, unique = partial(pathfinder.make_batch, arguments.seed, sizes), PATHFINDER, None
            names |= {"size", "contour_length"}
        folder = Folder(arguments.output, {name: str(getattr(arguments, name)) for name in sorted(names)})
        if arguments.source:
            arguments.sizes = copy_released(folder, arguments)
        else:
            make_splits(folder, arguments.sizes, make, features, unique, arguments.processes)
    except (OSError, ValueError) as error:
        fail(error)
    command = shlex.join(["python", "examples/lra/prepare.py", *(argv or sys.argv[1:])])
    title, text = TEXTS[arguments.task]
    if features is PATHFINDER:
        text = f"{text}\n\n{draw_sheet(folder)}"
    write_card(folder, arguments.task, title, text, command, arguments.sizes)


if __name__ == "__main__":
    main()
