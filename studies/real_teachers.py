"""Compare a sentence encoder of the Hub with its Luna from `from_teacher`.

    python studies/real_teachers.py --teacher FOLDER --data FOLDER --part exact stsb long packed [--trained FOLDER]

Prints one JSON line per measurement. FOLDER of `--data` contains the parquet files of GLUE's STS-B (`glue_stsb`), IMDB
(`imdb`) and WikiText-2 (`wikitext2_raw`). Parts: `exact` (largest difference for texts of up to l tokens), `stsb`
(Spearman correlation on the validation pairs), `long` (cosine of the vectors of packed texts to the teacher's),
`packed` (the same for Lunas with a packed sequence P that is calibrated for that length), `speed` (seconds of a forward
pass next to the teacher with SDPA). `stsb` and `long` also measure `--trained`, outputs of run_distill_embeddings.py.
"""

import argparse
import functools
import itertools
import json
import random
import re
import resource
import time
from pathlib import Path

import pandas
import torch
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertModel

from luna_mega.distillation import Teacher, build_student, calibrate, copy_weights, from_teacher, student_config
from luna_mega.distillation.embeddings import load_sentence_teacher, set_projection_length

PAIRS = ((256, 128), (256, 64), (512, 256), (512, 128))  # tokens and rows
FIT, TEXTS = 120, 24  # texts that the salience is fitted on, and that are compared


class Study:
    """The teacher, its Luna and the data."""

    def __init__(self, args):
        start = time.perf_counter()
        self.data, self.random = Path(args.data), random.Random(args.seed)
        self.train, self.name = self.reviews("train"), args.teacher
        self.student, self.tokenizer, report = from_teacher(args.teacher, args.rows, 8192, texts=self.train[:FIT])
        teacher = load_sentence_teacher(args.teacher)
        self.teacher, self.modules, self.window = teacher.model, teacher.modules, teacher.window
        self.students, self.references = {"Luna": self.student}, {}
        for folder in args.trained:
            self.students[f"trained Luna {folder}"] = AutoModel.from_pretrained(folder).eval()
        self.rows, self.seed = args.rows, args.seed
        seconds = round(time.perf_counter() - start, 1)
        show("conversion", seconds=seconds, memory=memory(), r2=[round(share, 3) for share in report.fit])

    def table(self, name, split):
        return pandas.read_parquet(next((self.data / name).glob(f"{split}-*.parquet")))

    def reviews(self, split):
        texts = [text.replace("<br />", " ") for text in self.table("imdb", split).text if len(text.split()) > 420]
        self.random.shuffle(texts)
        return texts

    @functools.cached_property
    def test(self):
        return self.reviews("test")[:TEXTS]

    @functools.cached_property
    def corpora(self):
        articles = [article for article in self.articles() if len(article.split()) > 420]
        return {"IMDB": self.test, "Wikipedia": articles[:TEXTS]}

    def articles(self):
        """Return the articles of the validation and test splits of WikiText-2, without their titles."""
        texts = ["".join(self.table("wikitext2_raw", split).text) for split in ("validation", "test")]
        return [article for text in texts for article in re.split(r"\n ?= (?!=)[^\n]* = \n", text) if article.strip()]

    def encode(self, texts, length):
        return dict(self.tokenizer(texts, truncation=True, max_length=length, padding=True, return_tensors="pt"))

    @torch.no_grad()
    def embed(self, model, texts, length, size=16):
        """Return the vectors of texts, which are sorted by length for little padding."""
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors = torch.zeros(len(texts), model.config.hidden_size)
        for start in range(0, len(texts), size):
            rows = order[start : start + size]
            batch = self.encode([texts[row] for row in rows], length)
            mask = batch["attention_mask"].bool()
            vectors[rows] = self.modules.embed(model(**batch).last_hidden_state, mask)
        return vectors

    @torch.no_grad()
    def exact(self):
        """Show the largest difference of the last states for texts of up to l tokens."""
        short = list(self.table("glue_stsb", "validation").sentence1[:12])
        batch = self.encode(self.test[:12] + short, self.rows)
        kept = batch["attention_mask"].bool()
        generator = torch.Generator().manual_seed(self.seed)
        gaps = kept & (torch.rand(kept.shape, generator=generator) > 0.2)
        gaps[:, 0] = True
        compiled = torch.compile(self.student, dynamic=True)
        for name, mask, model in (
            ("padded", kept, self.student),
            ("gaps", gaps, self.student),
            ("compiled", kept, compiled),
        ):
            given = batch | {"attention_mask": mask.long()}
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            reference = self.teacher(**given, position_ids=positions).last_hidden_state[mask]
            difference = (model(**given).last_hidden_state[mask] - reference).abs().max()
            show(f"exact: {name}", difference=f"{difference:.1e}", largest=f"{reference.abs().max():.1f}")

    def stsb(self):
        """Show the Spearman correlation on all validation pairs of STS-B."""
        pairs = self.table("glue_stsb", "validation")
        for name, model in {"teacher": self.teacher, **self.students}.items():
            start = time.perf_counter()
            texts = [*pairs.sentence1, *pairs.sentence2]
            vectors = self.embed(model, texts, self.rows, size=64)
            scores = torch.cosine_similarity(*vectors.split(len(pairs)))
            ranks = pandas.Series(scores.numpy()).rank().corr(pairs.label.rank())
            show(f"stsb: {name}", spearman=round(100 * ranks, 4), seconds=round(time.perf_counter() - start, 1))

    def long(self):
        """Show the cosine for all students."""
        for (name, student), (length, rows) in itertools.product(self.students.items(), PAIRS):
            set_projection_length(student, rows)
            self.compare(f"long: {name}", student, length, rows)

    def packed(self):
        """Show the cosine for a Luna with P, which is calibrated on training texts of the length."""
        teacher = Teacher(AutoModelForMaskedLM.from_pretrained(self.name))  # the head is new and not used
        for length, rows in PAIRS:
            student = build_student(teacher, student_config(teacher, "luna", projection_length=rows)).eval()
            copy_weights(teacher, student)
            texts = [self.train[start : start + 8] for start in range(0, min(64, len(self.train)), 8)]
            calibrate(teacher, student, [self.encode(batch, length) for batch in texts])
            self.compare("packed: Luna with P", student.base_model, length, rows)

    def compare(self, name, student, length, rows):
        """Show the mean cosine to the vectors of the teacher, which reads the complete text."""
        for corpus, texts in self.corpora.items():
            if (corpus, length) not in self.references:
                self.references[corpus, length] = self.embed(self.teacher, texts, length, size=8)
            vectors = self.embed(student, texts, length, size=8)
            cosine = torch.cosine_similarity(vectors, self.references[corpus, length]).mean().item()
            show(name, texts=corpus, tokens=length, rows=rows, cosine=round(cosine, 4))

    @torch.no_grad()
    def speed(self):
        """Show seconds per forward pass of one text; the teacher has SDPA and a position table of that length."""
        for length in (512, 2048, 8192):
            ids = torch.randint(5, 1000, (1, length))
            fields = self.teacher.config.to_dict() | {"max_position_embeddings": length}
            full = BertModel(BertConfig(**fields), add_pooling_layer=False).eval()
            for name, model in (("teacher", full), ("Luna", self.student)):
                model(input_ids=ids)
                times = []
                for _ in range(3):
                    start = time.perf_counter()
                    model(input_ids=ids)
                    times.append(time.perf_counter() - start)
                show(f"speed: {name}", tokens=length, seconds=round(min(times), 3))


def memory():
    """Return the peak memory of the process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def show(name, **values):
    print(json.dumps({"what": name, **values}), flush=True)


def make_parser(description):
    """Return a parser with the options of `Study`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="sentence-transformers model: a folder or a name on the Hub")
    parser.add_argument("--data", required=True, help="folder with the data sets")
    parser.add_argument("--rows", type=int, default=128, help="rows l of the Luna")
    parser.add_argument("--trained", nargs="+", default=[], help="output folders of run_distill_embeddings.py")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts")
    return parser


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=("exact", "stsb", "long", "packed", "speed"), default=["exact"])
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    study = Study(args)
    for part in args.part:
        for student in study.students.values():
            set_projection_length(student, args.rows)
        getattr(study, part)()


if __name__ == "__main__":
    main()
