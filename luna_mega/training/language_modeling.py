"""Text as one stream of tokens: training blocks, streams with a recurrent state, and scores."""

import math
from collections.abc import Iterable

import torch
from datasets import IterableDataset
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from luna_mega.hub.find import find_model
from luna_mega.hub.folder import load_tokenizer
from luna_mega.training.arguments import fail, one_line
from luna_mega.training.runs import total
from luna_mega.training.streams import Redrawn


def load_language_model(source: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in evaluation mode, and its tokenizer."""
    with one_line():
        return AutoModelForCausalLM.from_pretrained(find_model(source)).to(device).eval(), load_tokenizer(source)


def encode(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, line_end: str) -> torch.LongTensor:
    """Encode `texts` as one stream `[N]`, each followed by a newline or, if it is not empty, by `</s>`."""
    if line_end == "newline":
        lines, tail = [text + "\n" for text in texts], []
    else:
        lines, tail = [text.strip() for text in texts if text.strip()], [tokenizer.eos_token_id]
        if tail == [None]:
            fail("the tokenizer has no eos_token; pass --line_end newline")
    encoded = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"] if lines else []
    return torch.tensor([token for ids in encoded for token in [*ids, *tail]], dtype=torch.long)


def cut_stream(
    texts: IterableDataset, column: str, tokenizer: PreTrainedTokenizerBase, line_end: str, length: int
) -> IterableDataset:
    """Cut streamed texts into blocks of `length` tokens, with the tokens that follow each token.

    Each batch of 1,000 texts is concatenated; a remainder shorter than a block is dropped.
    """

    def cut(batch: dict[str, list[str]]) -> dict[str, list[torch.Tensor]]:
        stream = encode(batch[column], tokenizer, line_end)
        blocks = [_segment(stream, start, length) for start in range(0, len(stream) - length, length)]
        return {name: [block[name] for block in blocks] for name in ("input_ids", "shift_labels")}

    return texts.map(cut, batched=True, remove_columns=list(next(iter(texts)))).with_format("torch")


def draw_windows(stream: torch.LongTensor, length: int, seed: int) -> Redrawn:
    """Return blocks of `length` tokens at random positions of a stream, with the tokens that follow each token."""
    if len(stream) <= length:
        fail(f"the text has {len(stream)} tokens, too few for blocks of {length}; reduce --block_size")

    def cut(_: int, numbers: torch.Generator) -> dict[str, torch.Tensor]:
        return _segment(stream, int(torch.randint(len(stream) - length, (), generator=numbers)), length)

    return Redrawn(range(len(stream) // length), cut, seed)


class Streams(Dataset):
    """Stream that is cut into `batch_size` consecutive parts; each batch contains the next block of all parts.

    Item `step * batch_size + part` is block `step` of a part.
    """

    def __init__(self, stream: torch.LongTensor, length: int, batch_size: int):
        self.part = (len(stream) - 1) // batch_size
        if self.part < length:
            fail(f"the text has {len(stream)} tokens, too few for {batch_size} blocks of {length}; reduce --block_size")
        self.stream, self.length, self.batch_size = stream, length, batch_size

    def __len__(self) -> int:
        return self.part // self.length * self.batch_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, part = divmod(index, self.batch_size)
        item = _segment(self.stream, part * self.part + step * self.length, self.length)
        return item | {"step": torch.tensor(step)}


def _segment(stream: torch.LongTensor, start: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": stream[start : start + length], "shift_labels": stream[start + 1 : start + length + 1]}


@torch.no_grad()
def score_stream(
    model: PreTrainedModel,
    stream: torch.LongTensor,
    context: int,
    segment: int,
    batch_size: int,
    progress: bool = False,
    training: TrainingArguments | None = None,
) -> dict[str, float]:
    """Return the loss of a stream of tokens in nats per token, its perplexity, and the bits per token.

    Each token is predicted from all earlier tokens of its block. Shorter blocks therefore increase the loss, shorter
    segments do not. All processes call the model equally often, because sharded models require it.

    Args:
        model: Causal language model with a cache.
        stream: Tokens `[N]`.
        context: Number of tokens of a block; each block starts without a cache.
        segment: Number of tokens of a forward pass.
        batch_size: Number of blocks of a forward pass.
        progress: Whether to show a progress bar.
        training: Options of a run, whose processes score a share of the blocks each; None = a single process.
    """
    was_training, device, count = model.training, model.device, len(stream) - 1
    if count < 1:
        fail("the text has fewer than two tokens")
    model.eval()
    starts = list(range(0, count - context + 1, context))
    groups = [starts[i : i + batch_size] for i in range(0, len(starts), batch_size)]
    rank, processes = (0, 1) if training is None else (training.process_index, training.world_size)
    own = [(group, True) for group in groups[rank::processes]]
    own += [(group, False) for group in groups[:1]] * (math.ceil(len(groups) / processes) - len(own))
    if rest := count % context:
        own.append(([count - rest], rank == 0))
    summed, counted = 0.0, 0
    for group, counts in tqdm(own, disable=not progress, unit="blocks"):
        past, length = None, min(context, count - group[-1])
        block = torch.stack([stream[start : start + length + 1] for start in group]).to(device)
        for start in range(0, length, segment):
            end = min(start + segment, length)
            inputs, targets = block[:, start:end], block[:, start + 1 : end + 1].contiguous()
            output = model(
                inputs,
                attention_mask=torch.ones_like(block[:, :end]),
                labels=targets,  # transformers' models compute no loss without labels
                shift_labels=targets,
                use_cache=True,
                cache=past,
            )
            past = output["cache"]
            summed += output.loss.item() * targets.numel() * counts
            counted += targets.numel() * counts
    model.train(was_training)
    if training is not None:
        summed, counted = total([summed, counted], training)
    loss = summed / counted
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bits_per_token": loss / math.log(2)}
