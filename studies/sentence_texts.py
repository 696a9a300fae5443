"""Write texts to train a Luna from a sentence encoder: passages of Wikipedia, and as many movie reviews.

    python studies/sentence_texts.py --data FOLDER --output FOLDER

FOLDER of `--data` contains the parquet files of WikiText-2 (`wikitext2`) and IMDB (`imdb`). The output contains
`train.parquet` with passages of 250 words and reviews, and `test.parquet` with the reviews of the test split.
"""

import argparse
from pathlib import Path

import pandas

WORDS = 250  # per passage


def read_texts(folder, split):
    return pandas.concat(map(pandas.read_parquet, sorted(folder.glob(f"{split}-*.parquet")))).text


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    words = " ".join(read_texts(args.data / "wikitext2", "train")).replace("<unk>", " ").split()
    passages = [" ".join(words[start : start + WORDS]) for start in range(0, len(words), WORDS)]
    reviews = read_texts(args.data / "imdb", "train").sample(len(passages), random_state=0)
    args.output.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame({"text": [*passages, *reviews]}).to_parquet(args.output / "train.parquet")
    read_texts(args.data / "imdb", "test").to_frame().to_parquet(args.output / "test.parquet")


if __name__ == "__main__":
    main()
