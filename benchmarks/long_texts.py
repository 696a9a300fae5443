"""Evaluate texts longer than a teacher reads: windows of the teacher, and its Luna without training.

    python benchmarks/long_texts.py vectors    percent of sentences of WikiText-2 that find their article
    python benchmarks/long_texts.py classes    accuracy for concatenated IMDB reviews of one label

The teacher is a sentence encoder of the BERT family whose vectors are means over tokens. The Luna packs texts by a
salience that is fitted on 100 training reviews of IMDB. Prints one row of JSON for each length.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator

import torch
from datasets import load_dataset
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from luna_mega.distillation import from_teacher
from luna_mega.distillation.windows import split_windows

DOCUMENTS, SENTENCES = 40, 8  # articles, sentences of an article
REVIEWS, HELD_OUT = 1300, 200  # that train and that test the head of the teacher
LONG = 450  # least number of words of a review on which the salience is fitted


class Encoder:
    """A teacher, its tokenizer, and the data of its Luna."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.teacher)
        reviews = load_dataset(options.imdb, split="train")["text"]
        long = [text for text in reviews if len(text.split()) >= LONG]
        self.texts = long[:: max(len(long) // 100, 1)][:100]

    def read(self, text: str) -> list[int]:
        """Return all tokens of a text, without the first and the last that the tokenizer adds."""
        return self.tokenizer(text.replace("<br />", " "), add_special_tokens=False, verbose=False)["input_ids"]

    def batch(self, tokens: list[int]) -> dict[str, torch.Tensor]:
        """Return the inputs `[1, T]` of one text."""
        ids = torch.tensor([[self.tokenizer.cls_token_id, *tokens, self.tokenizer.sep_token_id]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def to_luna(self, teacher: str) -> nn.Module:
        longest = max(self.options.lengths)
        return from_teacher(teacher, self.options.projection_length, max_length=longest, texts=self.texts).model


def vectors(encoder: Encoder) -> Iterator[dict[str, float]]:
    """Yield, for each length, the percent of sentences whose nearest article is the one that contains them."""
    options = encoder.options
    teacher, luna = AutoModel.from_pretrained(options.teacher).eval(), encoder.to_luna(options.teacher)
    table = teacher.config.max_position_embeddings - 2
    splits = load_dataset(*options.wikitext)
    lines = [line.rstrip("\n") for name in ("validation", "test") for line in splits[name]["text"]]
    articles = re.split(r"(?m)^(?= = [^=\n]+ = $)", "\n".join(lines))
    tokens = [encoder.read(text) for text in articles if text.strip()]
    stop, rng = encoder.tokenizer.convert_tokens_to_ids("."), random.Random(0)

    def encode(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        return nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

    for length in options.lengths:
        documents = [x[: length - 2] for x in tokens if len(x) >= length - 2][:DOCUMENTS]
        sentences = []
        for row, document in enumerate(documents):
            stops = [-1, *(i for i, token in enumerate(document) if token == stop)]
            found = [document[a + 1 : b + 1] for a, b in zip(stops, stops[1:], strict=False) if 10 <= b - a <= 48]
            sentences += [(row, x) for x in rng.sample(found, min(SENTENCES, len(found)))]
        rows = torch.tensor([row for row, _ in sentences])
        queries = torch.cat([encode(teacher, encoder.batch(x)) for _, x in sentences])
        inputs = [encoder.batch(x) for x in documents]
        windows = [split_windows(x["attention_mask"].bool(), options.window).inputs(x) for x in inputs]
        parts = [encode(teacher, x) for x in windows]
        scores = {
            "teacher, truncated": torch.cat([encode(teacher, encoder.batch(x[:table])) for x in documents]),
            "mean of windows": nn.functional.normalize(torch.stack([x.mean(0) for x in parts])),
            "Luna": torch.cat([encode(luna, x) for x in inputs]),
        }
        scores = {name: queries @ x.T for name, x in scores.items()}
        scores["one vector per window"] = torch.stack([(queries @ x.T).amax(1) for x in parts], 1)
        yield {"tokens": length, "sentences": len(rows)} | {k: percent(x.argmax(1), rows) for k, x in scores.items()}


def classes(encoder: Encoder) -> Iterator[dict[str, float]]:
    """Yield, for each length, the accuracy of a head on the first token that was trained on short reviews."""
    options = encoder.options
    folder, held_out = train_head(encoder)
    yield {"accuracy on short reviews": held_out}
    teacher, luna = AutoModelForSequenceClassification.from_pretrained(folder).eval(), encoder.to_luna(folder)
    table = teacher.config.max_position_embeddings
    data = load_dataset(options.imdb, split="test").shuffle(seed=0)
    reviews = [iter([x["text"] for x in data if x["label"] == label]) for label in (0, 1)]
    for length in options.lengths:
        logits, labels = {}, torch.arange(DOCUMENTS) % 2
        for label in labels.tolist():
            tokens: list[int] = []
            while len(tokens) < length - 2:
                tokens += encoder.read(next(reviews[label]))
            inputs = encoder.batch(tokens[: length - 2])
            windows = split_windows(inputs["attention_mask"].bool(), table)
            for name, scores in (
                ("teacher, truncated", teacher(**encoder.batch(tokens[: min(length, table) - 2])).logits),
                ("mean of windows", windows.mean(teacher(**windows.inputs(inputs)).logits)),
                ("Luna", luna(**inputs).logits),
            ):
                logits.setdefault(name, []).append(scores)
        yield {"tokens": length} | {name: percent(torch.cat(x).argmax(1), labels) for name, x in logits.items()}


def train_head(encoder: Encoder) -> tuple[str, float]:
    """Train a head on the first token of short reviews; return the folder of the classifier and its accuracy."""
    options = encoder.options
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(options.teacher, num_labels=2).eval()
    data = load_dataset(options.imdb, split="train").shuffle(seed=0).select(range(REVIEWS + HELD_OUT))
    labels = torch.tensor(data["label"])
    batches = [encoder.batch(encoder.read(text)[: options.window - 2]) for text in data["text"]]
    states = torch.cat([model.base_model(**x).last_hidden_state[:, :1] for x in batches])
    pooler, width = model.base_model.pooler, states.shape[-1]
    head = nn.Sequential(pooler, nn.Dropout(0.3), model.classifier).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.05)
    with torch.enable_grad():
        for _ in range(400):
            rows = torch.randint(0, REVIEWS, (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(states[rows].view(64, 1, width)), labels[rows]).backward()
            optimizer.step()
    head.eval()
    model.save_pretrained(options.output)
    encoder.tokenizer.save_pretrained(options.output)
    return options.output, percent(head(states[REVIEWS:]).argmax(1), labels[REVIEWS:])


def percent(predicted: torch.Tensor, expected: torch.Tensor) -> float:
    return round(100 * predicted.eq(expected).float().mean().item(), 1)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("vectors", "classes"))
    parser.add_argument("--teacher", default="sentence-transformers/all-MiniLM-L6-v2", help="name or folder")
    parser.add_argument("--imdb", default="stanfordnlp/imdb", help="name or folder of the reviews")
    names = ["Salesforce/wikitext", "wikitext-2-raw-v1"]
    parser.add_argument(
        "--wikitext", nargs="+", default=names, help="name and configuration, or folder, of the articles"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of a text")
    parser.add_argument("--projection_length", type=int, default=128, help="rows l of the Luna")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window, and of a short review")
    parser.add_argument("--output", default="outputs/long_texts", help="folder of the classifier")
    options = parser.parse_args(argv)
    results = []
    with torch.no_grad():
        for row in {"vectors": vectors, "classes": classes}[options.part](Encoder(options)):
            print(json.dumps(row), flush=True)
            results.append(row)
    return results


if __name__ == "__main__":
    main()
