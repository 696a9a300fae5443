"""Evaluate a bag of words on a text classification dataset, as a baseline for the results of the other scripts.

    python examples/bag_of_words.py --dataset_name stanfordnlp/imdb --split test
    python examples/bag_of_words.py --dataset_name nyu-mll/glue --dataset_config sst2 --text_columns sentence

A logistic regression reads the TF-IDF of words and bigrams. Its settings are not tuned. For two text columns, it reads
the vectors of both texts and their product. If the labels are numbers with a fraction, such as the similarities of
STS-B, nothing is trained: the score is the cosine similarity of the two vectors.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import json
import re
import time
from dataclasses import dataclass

import numpy as np
from scipy.sparse import hstack
from scipy.stats import pearsonr, spearmanr
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers.hf_argparser import HfArg

from luna_mega import training as lib


@dataclass
class DataArguments(lib.SourceArguments):
    text_columns: list[str] = HfArg(default_factory=lambda: ["text"], help="text column, or two columns for pairs")
    label_column: str = HfArg(default="label", help="column with the labels: names, ids or scores")
    split: str = HfArg(default="validation", help="split to evaluate; the classifier is trained on the split train")
    max_characters: int | None = HfArg(default=None, help="read only the first N characters of a text")


def read_labels(*columns: list) -> list[list]:
    """Return the labels of the splits; the texts of CSV files as numbers if all of them are."""
    labels = [label for column in columns for label in column]
    if not all(isinstance(label, str) and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", label) for label in labels):
        return list(columns)
    kind = int if all(float(label).is_integer() for label in labels) else float
    return [[kind(float(label)) for label in column] for column in columns]


def evaluate(data: DataArguments) -> dict[str, float]:
    """Return the metrics of the split; exit if it has no labels."""
    splits = lib.load_splits({"train": None, data.split: None}, data, data.text_columns, label=data.label_column)
    texts = {
        name: [[text[: data.max_characters] for text in split[column]] for column in data.text_columns]
        for name, split in splits.items()
    }
    vectorizer = TfidfVectorizer(ngram_range=(1, 2)).fit(text for column in texts["train"] for text in column)

    def features(name: str) -> list:
        """Return the vectors of each text column and, for pairs, their product, all `[N, terms]`."""
        vectors = [vectorizer.transform(column) for column in texts[name]]
        return vectors if len(vectors) == 1 else [*vectors, vectors[0].multiply(vectors[1])]

    train, known = read_labels(*(splits[name][data.label_column][:] for name in ("train", data.split)))
    if {None, -1} & {*train, *known}:
        lib.fail(f"--split {data.split}: rows of this split or of the training split have no label; pass another split")
    if isinstance(known[0], float):
        similarities = np.asarray(features(data.split)[-1].sum(axis=1)).ravel()
        return {"pearson": pearsonr(similarities, known)[0], "spearmanr": spearmanr(similarities, known)[0]}
    classifier = LogisticRegression(C=30, max_iter=1000).fit(hstack(features("train")).tocsr(), train)
    predicted = classifier.predict(hstack(features(data.split)).tocsr())
    average = "binary" if set(train) == {0, 1} else "macro"
    metrics = {"accuracy": accuracy_score(known, predicted), "f1": f1_score(known, predicted, average=average)}
    return metrics | {"matthews_correlation": matthews_corrcoef(known, predicted)}


def main(argv: list[str] | None = None) -> dict[str, float]:
    (data,) = lib.parse_arguments((DataArguments,), argv)
    if len(data.text_columns) > 2:
        lib.fail(f"--text_columns {' '.join(data.text_columns)} must be one column, or two columns for pairs")
    start = time.perf_counter()
    with lib.one_line():  # scikit-learn raises errors for texts without words, and for a single class
        metrics = {name: float(value) for name, value in evaluate(data).items()}
    metrics["seconds"] = time.perf_counter() - start
    print(json.dumps(metrics))
    return metrics


if __name__ == "__main__":
    main()
