"""Compare encodings of Wikipedia articles: a Luna from `from_teacher`, and what its teacher can do with long texts.

    python studies/long_documents.py --teacher FOLDER --data FOLDER --lengths 1024 2048 4096 [--trained FOLDER ...]

FOLDER of `--data` contains the parquet files of WikiText-2 (`wikitext2_raw`) and of IMDB (`imdb`), which the salience
is fitted on. The methods are the teacher on its first 512 tokens, the mean of the teacher's windows, the teacher with
its position table stretched to the length of the text, and Lunas with `--rows` rows and with twice as many; `--trained`
are outputs of run_distill_embeddings.py. Prints one JSON line per method and length:

- half: percentage of articles whose first half is closest to its own second half;
- sentence: percentage of sentences that are closest to their own article; `beyond`: of those after token 512;
- CPU seconds per article, and increase of the peak memory in MiB (Linux), one article at a time.
"""

import copy
import ctypes
import random
import re
import time
from pathlib import Path

import torch
from real_teachers import Study, make_parser, show
from torch.nn import functional

from luna_mega.distillation.embeddings import set_projection_length, teacher_vectors

SENTENCES, LEAST, MOST = 4, 10, 48  # sentences of an article, and their number of tokens


class Documents(Study):
    """The encoders and the articles, as token ids without special tokens."""

    def __init__(self, args):
        super().__init__(args)
        self.first, self.last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        self.end = self.tokenizer.convert_tokens_to_ids(".")
        self.ids = self.tokenizer(self.articles(), add_special_tokens=False, verbose=False)["input_ids"]

    def sentences(self, ids):
        """Return (start, ids) of some sentences of an article."""
        ends = [-1, *(place for place, token in enumerate(ids) if token == self.end)]
        spans = zip(ends, ends[1:], strict=False)
        found = [(start + 1, ids[start + 1 : end + 1]) for start, end in spans if LEAST <= end - start <= MOST]
        return self.random.sample(found, min(SENTENCES, len(found)))

    def batch(self, ids):
        row = torch.tensor([[self.first, *ids, self.last]])
        return {"input_ids": row, "attention_mask": torch.ones_like(row)}

    @torch.no_grad()
    def vectors(self, encode, texts):
        return torch.cat([functional.normalize(encode(self.batch(ids)), dim=-1) for ids in texts])

    def truncated(self, batch):
        return self.pool(self.teacher, {name: ids[:, : self.limit] for name, ids in batch.items()})

    @property
    def limit(self):
        return self.teacher.config.max_position_embeddings

    def pool(self, model, batch):
        return self.modules.embed(model(**batch).last_hidden_state, batch["attention_mask"].bool())

    def windows(self, batch):
        return teacher_vectors(self.teacher, self.modules, batch, self.window)

    def stretched(self, length):
        """Return the teacher with its position table interpolated to a length."""
        model = copy.deepcopy(self.teacher)
        table = model.embeddings.position_embeddings
        columns = functional.interpolate(table.weight.T[None], size=length, mode="linear", align_corners=True)
        table.weight, table.num_embeddings = torch.nn.Parameter(columns[0].T.contiguous()), length
        model.embeddings.register_buffer("position_ids", torch.arange(length)[None])
        model.embeddings.register_buffer("token_type_ids", torch.zeros(1, length, dtype=torch.long))
        return model

    def full(self, batch):
        length = batch["input_ids"].shape[1]
        return self.pool(self.teacher if length <= self.limit else self.tables[length], batch)

    def measure(self, length, methods, most):
        """Show the figures of every method for articles cut to a length."""
        articles = [ids[: length - 2] for ids in self.ids if len(ids) >= length - 2][:most]
        middle = length // 2 - 2
        halves = [[ids[:middle] for ids in articles], [ids[middle : 2 * middle] for ids in articles]]
        spans = [(row, *span) for row, ids in enumerate(articles) for span in self.sentences(ids)]
        owner = torch.tensor([row for row, _, _ in spans])
        beyond = torch.tensor([start + len(ids) > self.limit for _, start, ids in spans])
        self.tables = {size: self.stretched(size) for size in {length, middle + 2} if size > self.limit}
        for name, encode in methods.items():
            self.vectors(encode, [articles[0][:8]])  # reads the weights from the file
            before = reset_peak()
            start = time.process_time()
            documents = self.vectors(encode, articles)
            seconds, used = (time.process_time() - start) / len(articles), peak() - before
            former, latter = (self.vectors(encode, half) for half in halves)
            found = self.vectors(encode, [ids for _, _, ids in spans]) @ documents.T
            right = found.argmax(1) == owner
            show(
                f"documents: {name}",
                tokens=length,
                articles=len(articles),
                half=percent((former @ latter.T).argmax(1) == torch.arange(len(articles))),
                sentence=percent(right),
                beyond=percent(right[beyond]),
                seconds=round(seconds, 3),
                memory=used,
            )

    def luna(self, model, rows):
        def encode(batch):
            set_projection_length(model, rows)
            return self.pool(model, batch)

        return encode


def percent(right):
    return round(100 * right.float().mean().item(), 1)


def peak():
    """Return the peak memory of the process since `reset_peak`, in MiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8-sig"))[1]) // 1024


def reset_peak():
    """Return free memory to the system, start a new measurement of the peak, and return the memory in use, in MiB."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096], help="tokens of an article")
    parser.add_argument("--most", type=int, default=120, help="number of articles")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    study = Documents(args)
    methods = {"teacher, truncated": study.truncated, "windows": study.windows, "full attention": study.full}
    for name, student in study.students.items():
        for rows in (args.rows, 2 * args.rows):
            methods[f"{name}, l = {rows}"] = study.luna(student, rows)
    for length in args.lengths:
        study.measure(length, methods, args.most)


if __name__ == "__main__":
    main()
