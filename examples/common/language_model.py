"""Text as one stream of tokens: training windows, streams whose state is carried on, and their scores."""

import math
from dataclasses import dataclass

import torch
from datasets import Dataset as TextDataset
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.arguments import fail
from common.model import boundary_ids


def encode(texts: TextDataset, column: str, tokenizer: PreTrainedTokenizerBase, line_end: str) -> torch.LongTensor:
    """The rows of `texts` as one stream `[N]`; each ends with a newline or, where not empty, with `</s>`."""
    if line_end == "newline":
        rows, tail = (text + "\n" for text in texts[column]), []
    else:
        rows, tail = (text.strip() for text in texts[column] if text.strip()), [boundary_ids(tokenizer)[1]]
    ids = tokenizer(list(rows), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for row in ids for token in [*row, *tail]], dtype=torch.long)


class Windows(Dataset):
    """As many windows of `length` tokens as the stream has, at random places; the token that follows is the target."""

    def __init__(self, stream: torch.LongTensor, length: int):
        if len(stream) <= length:
            fail(f"the text has {len(stream)} tokens, too few for blocks of {length}")
        self.stream, self.length = stream, length

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(torch.randint(len(self.stream) - self.length, ()))
        return _segment(self.stream, start, self.length)


class Streams(Dataset):
    """The stream in `rows` parts that are read side by side: item `step * rows + row`, for batches of `rows`."""

    def __init__(self, stream: torch.LongTensor, length: int, rows: int):
        self.part = (len(stream) - 1) // rows
        if self.part < length:
            fail(f"the text has {len(stream)} tokens, too few for {rows} streams of blocks of {length}")
        self.stream, self.length, self.rows = stream, length, rows

    def __len__(self) -> int:
        return self.part // self.length * self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, row = divmod(index, self.rows)
        item = _segment(self.stream, row * self.part + step * self.length, self.length)
        return item | {"step": torch.tensor(step)}


def _segment(stream: torch.LongTensor, start: int, length: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": stream[start : start + length],
        "shift_labels": stream[start + 1 : start + length + 1],
    }


@dataclass
class Score:
    """Sum of the negative log-likelihoods in nats of `tokens` tokens."""

    total: float
    tokens: int

    @property
    def loss(self) -> float:
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))

    @property
    def bits(self) -> float:
        return self.loss / math.log(2)


@torch.no_grad()
def score(
    model: PreTrainedModel, stream: torch.LongTensor, context: int, segment: int, rows: int, progress: bool = False
) -> Score:
    """Scores the stream in blocks of `context` tokens, each read from nothing by segments that carry the state on.

    `rows` blocks are read side by side. A token's score depends on what of its block comes before it, so that blocks
    cost the first tokens of each something, segments nothing.
    """
    training, device, count = model.training, model.device, len(stream) - 1
    if count < 1:
        fail("the text to score has fewer than two tokens")
    model.eval()
    whole = list(range(0, count - context + 1, context))
    groups = [whole[i : i + rows] for i in range(0, len(whole), rows)]
    if rest := count % context:
        groups.append([count - rest])
    total, counted = 0.0, 0
    for group in tqdm(groups, disable=not progress, unit="blocks"):
        past, length = None, min(context, count - group[-1])
        block = torch.stack([stream[start : start + length + 1] for start in group]).to(device)
        for start in range(0, length, segment):
            end = min(start + segment, length)
            inputs, targets = block[:, start:end], block[:, start + 1 : end + 1]
            output = model(
                inputs,
                attention_mask=torch.ones_like(inputs),
                shift_labels=targets,
                past_key_values=past,
                use_cache=True,
            )
            past = output.past_key_values
            total += output.loss.item() * targets.numel()
            counted += targets.numel()
    model.train(training)
    return Score(total, counted)
