"""Combine the texts of several datasets into one folder for run_mlm.py or run_clm.py.

    python examples/prepare_text.py --output_dir data/english --source Salesforce/wikitext@wikitext-2-raw-v1 text \
        --source stanfordnlp/imdb text --source ehovy/race@all article --source bentrevett/multi30k en

A source is the name of a dataset on the Hub, optionally with @ and its configuration, or a local folder, followed by
the text column (`translation.en` for a column of a translation). The splits train and unsupervised are read. Duplicate
texts are removed, and validation texts are drawn with --seed. The folder contains a dataset card and can be pushed to
the Hub if the licenses of the sources permit it.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
from datasets import Dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import DatasetCard, DatasetCardData

from luna_mega import training as lib

SPLITS = ("train", "unsupervised")
CARD = """---
{data}
---

# Text of {count} sources

Plain text (`text`) and its source (`source`), without duplicates. A text has the license of its source.

| source | column | texts |
|---|---|---|
{sources}

| split | texts |
|---|---|
| train | {train:,} |
| validation, drawn with seed {seed} | {validation:,} |

Created by `examples/prepare_text.py` of luna-mega.
"""


def read_texts(source: str, column: str) -> list[str]:
    """Return the stripped texts of a source in order, without duplicates."""
    name, _, configuration = source.partition("@")
    with lib.one_line(f"cannot load {source}", DatasetsError):
        if Path(source).is_dir():
            files = lib.find_files(source)
            found = lib.load_files({split: files[split] for split in SPLITS if split in files})
        else:
            found = lib.load_from_hub(name, configuration or None, option="source")
    splits = [found[split].flatten() for split in SPLITS if split in found]
    if not splits:
        lib.fail(f"{source} has no split {' or '.join(SPLITS)}")
    texts: dict[str, None] = {}
    for split in splits:
        if column not in split.column_names:
            lib.fail(f"{source} has no column {column}, only {', '.join(split.column_names)}")
        for row, text in enumerate(split[column]):
            if not isinstance(text, str):
                lib.fail(f"{source}, row {row}: {column} is {text!r} instead of text")
            texts[text.strip()] = None
    texts.pop("", None)
    return list(texts)


def write_card(folder: Path, counts: dict[tuple[str, str], int], sizes: dict[str, int], seed: int) -> None:
    """Write a dataset card with the number of texts per source and split."""
    files = [{"split": split, "path": f"{split}.parquet"} for split in ("train", "validation")]
    data = DatasetCardData(
        configs=[{"config_name": "default", "data_files": files}], task_categories=["fill-mask", "text-generation"]
    )
    sources = "\n".join(f"| {name} | `{column}` | {count:,} |" for (name, column), count in counts.items())
    card = CARD.format(data=data.to_yaml(), count=len(counts), sources=sources, seed=seed, **sizes)
    DatasetCard(card).save(folder / "README.md")


def main(argv: list[str] | None = None) -> dict[str, int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs=2, action="append", metavar=("NAME", "COLUMN"), required=True)
    parser.add_argument("--validation", type=int, default=1000, help="number of validation texts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the selection of validation texts")
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="output folder for train.parquet and validation.parquet"
    )
    arguments = parser.parse_args(argv)
    for name, path in [("output_dir", arguments.output_dir), *(("source", source) for source, _ in arguments.source)]:
        lib.check_no_file(name, path)
    sources: dict[str, tuple[str, str]] = {}
    for source, column in arguments.source:
        texts = read_texts(source, column)
        print(f"{source}: {len(texts):,} texts, {sum(map(len, texts)) / 1e6:.1f} million characters")
        # The card contains no local paths.
        name = Path(source).resolve().name if Path(source).is_dir() else source
        for text in texts:
            sources.setdefault(text, (name, column))
    rows = Dataset.from_dict({"text": list(sources), "source": [name for name, _ in sources.values()]})
    if not 0 < arguments.validation < len(rows):
        lib.fail(f"--validation {arguments.validation} must be between 0 and the {len(rows)} texts")
    drawn = np.random.default_rng(arguments.seed).permutation(len(rows))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for name, chosen in (("validation", drawn[: arguments.validation]), ("train", drawn[arguments.validation :])):
        rows.select(np.sort(chosen)).to_parquet(str(arguments.output_dir / f"{name}.parquet"))
        sizes[name] = len(chosen)
    write_card(arguments.output_dir, Counter(sources.values()), sizes, arguments.seed)
    print(f"{arguments.output_dir}: {sizes['train']:,} training texts, {sizes['validation']:,} validation texts")
    return sizes


if __name__ == "__main__":
    main()
