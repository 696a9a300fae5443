"""Fine-tune encoders for a task that requires both halves of a text: does the second continue the first?

    python studies/far_evidence.py --teacher FOLDER --data FOLDER --methods full half quarter linear mlp attention

The texts are passages of RACE (parquet files in the folder `race_high` of `--data`), cut to `--length` tokens. In half
of the texts, the second half belongs to another passage. The methods are the teacher with full attention (`full`),
Lunas that pack a text into `length / 2` and `length / 4` rows (`half`, `quarter`), and the teacher on both halves
separately, with a classifier on the mean of the two vectors (`linear`), with a hidden layer on the vectors, their
product and their difference (`mlp`), or after an attention layer (`attention`). The Lunas are conversions of the
teacher, or `--trained`, an output of run_distill_embeddings.py. Prints one JSON line per method and seed: accuracy in
percent, CPU seconds per training step, and increase of the peak memory in training in MiB (Linux). Only compare the
memory of the first method of a process, not after a conversion: memory that was used before is not counted.
"""

import argparse
import random
import time
from pathlib import Path

import pandas
import torch
from long_documents import peak, reset_peak
from real_teachers import show
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
    set_seed,
)

from luna_mega.distillation import from_teacher
from luna_mega.distillation.embeddings import SALIENCE_LEARNING_RATE

ROWS = {"half": 2, "quarter": 4}  # method -> tokens per row
HEADS = ("linear", "mlp", "attention")
FIT = 120  # passages that the salience is fitted on


class Windows(nn.Module):
    """Classifier of the vectors of both halves of a text, which the teacher reads separately."""

    def __init__(self, teacher, head):
        super().__init__()
        self.encoder, self.head = AutoModel.from_pretrained(teacher, add_pooling_layer=False), head
        width = self.encoder.config.hidden_size
        if head == "mlp":
            self.classifier = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, 2))
        else:
            self.classifier = nn.Linear(width, 2)
        if head == "attention":
            heads = self.encoder.config.num_attention_heads
            self.attention = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
            self.positions = nn.Parameter(torch.zeros(2, width))

    def forward(self, ids):
        halves = ids[:, 1:-1].chunk(2, dim=1)
        windows = torch.cat([torch.cat([ids[:, :1], half, ids[:, -1:]], dim=1) for half in halves])
        one, two = self.encoder(windows).last_hidden_state.mean(dim=1).chunk(2)
        if self.head == "mlp":
            return self.classifier(torch.cat([one, two, one * two, (one - two).abs()], dim=-1))
        vectors = torch.stack([one, two], dim=1)
        if self.head == "attention":
            vectors = self.attention(vectors + self.positions)
        return self.classifier(vectors.mean(dim=1))


class Texts:
    """Passages as token ids, and batches of texts with labels."""

    def __init__(self, args, tokenizer):
        self.tokenizer, self.size = tokenizer, args.length // 2 - 1
        folder = Path(args.data, "race_high")
        self.passages = {
            split: pandas.read_parquet(next(folder.glob(f"{split}-*.parquet"))).article.drop_duplicates().tolist()
            for split in ("train", "validation")
        }

    def batches(self, split, seed, count, batch_size):
        """Yield `count` batches of ids `[B, length]` and labels `[B]`, 1 = the second half continues the first."""
        rng, passages = random.Random(seed), self.passages[split]
        order = rng.sample(range(len(passages)), len(passages))
        halves = []
        for index in order:
            ids = self.tokenizer(passages[index], add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= 2 * self.size:
                halves.append((ids[: self.size], ids[self.size : 2 * self.size]))
            if len(halves) == batch_size + 1:
                labels = [rng.randrange(2) for _ in range(batch_size)]
                seconds = [halves[row + 1 - label][1] for row, label in enumerate(labels)]
                ends = [self.tokenizer.cls_token_id], [self.tokenizer.sep_token_id]
                pairs = zip(halves, seconds, strict=False)
                yield torch.tensor([ends[0] + one + two + ends[1] for (one, _), two in pairs]), torch.tensor(labels)
                halves, count = [], count - 1
            if not count:
                return


def make_model(method, args, texts):
    """Return a function of token ids that returns logits, and the module with its parameters."""
    if method in HEADS:
        model = Windows(args.teacher, method)
        return model, model
    if method == "full":
        model = AutoModelForSequenceClassification.from_pretrained(args.teacher, num_labels=2)
    else:
        rows = args.length // ROWS[method]
        if args.trained:
            load = AutoModelForSequenceClassification.from_pretrained
            model = load(args.trained, projection_length=rows, num_labels=2)
        else:
            model = from_teacher(args.teacher, rows, 4096, texts=texts.passages["train"][:FIT], num_labels=2).model
    return model, lambda ids: model(ids, attention_mask=torch.ones_like(ids)).logits


def run(method, seed, args, texts):
    """Train and evaluate one model."""
    set_seed(seed)
    model, logits = make_model(method, args, texts)
    before = reset_peak()
    names = dict(model.named_parameters())
    salience = [parameter for name, parameter in names.items() if name.endswith("salience")]
    others = [parameter for name, parameter in names.items() if not name.endswith("salience")]
    groups = [{"params": others}] + [{"params": salience, "lr": SALIENCE_LEARNING_RATE}] * bool(salience)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    schedule = get_linear_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    model.train()
    start = time.process_time()
    for ids, labels in texts.batches("train", seed, args.steps, args.batch_size):
        functional.cross_entropy(logits(ids), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = (time.process_time() - start) / args.steps
    model.eval()
    with torch.no_grad():
        batches = texts.batches("validation", 0, args.eval_batches, args.batch_size)
        right = torch.cat([logits(ids).argmax(-1) == labels for ids, labels in batches])
    show(
        f"far evidence: {method}",
        seed=seed,
        accuracy=round(100 * right.float().mean().item(), 1),
        texts=len(right),
        seconds=round(seconds, 2),
        memory=peak() - before,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="BERT-like encoder: a folder or a name on the Hub")
    parser.add_argument("--data", required=True, help="folder with the data sets")
    parser.add_argument("--trained", help="output folder of run_distill_embeddings.py for `half` and `quarter`")
    parser.add_argument("--methods", nargs="+", choices=("full", *ROWS, *HEADS), default=["full"])
    parser.add_argument("--length", type=int, default=256, help="tokens of a text, a multiple of 4")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--batch_size", type=int, default=16, help="texts per step")
    parser.add_argument("--eval_batches", type=int, default=30, help="batches of the evaluation")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="highest learning rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the training")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    texts = Texts(args, AutoTokenizer.from_pretrained(args.teacher))
    for seed in args.seeds:
        for method in args.methods:
            run(method, seed, args, texts)


if __name__ == "__main__":
    main()
