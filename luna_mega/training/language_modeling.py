"""Text as one stream of tokens: training blocks, streams with a recurrent state, and scores.

A tokenizer that is saved with a model contains the settings of its training that also apply to evaluation and
generation, see `store_settings`.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from luna_mega.hub.find import find_model
from luna_mega.hub.folder import load_tokenizer
from luna_mega.modeling_common.cache import StateCache, new_cache
from luna_mega.training.arguments import fail, one_line, say
from luna_mega.training.streams import Change, Redrawn
from luna_mega.training.trainer import total

# Settings of the training that `store_settings` saves, with the values for models without them.
SETTINGS = {
    "line_end": "eos",
    "text_column": "text",
    "validation_share": 0.0,
    "eval_context": 8192,
    "eval_segment": 1024,
    "tokenization": "bpe",
}
_KEY = "language_modeling"  # in tokenizer_config.json


def store_settings(tokenizer: PreTrainedTokenizerBase, options: object) -> None:
    """Store the values of `SETTINGS` in the tokenizer, which is saved with the model."""
    tokenizer.init_kwargs[_KEY] = {name: getattr(options, name) for name in SETTINGS}


def read_settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the settings that `store_settings` has stored; empty for other models."""
    return dict(tokenizer.init_kwargs.get(_KEY) or {})


def apply_settings(options: object, tokenizer: PreTrainedTokenizerBase | None, *names: str) -> None:
    """Set the options `names` that are None to the settings of the training.

    A different value that was passed is used, and a line says so.

    Args:
        options: The options.
        tokenizer: The saved tokenizer; None for a new model.
        names: Options, with the names of their settings.
    """
    stored = {} if tokenizer is None else read_settings(tokenizer)
    for name in names:
        given, trained = getattr(options, name), stored.get(name)
        if name == "tokenization" and tokenizer is not None:
            setattr(options, name, trained)
            if given not in (None, trained):
                say(f"--tokenization {given} is not used, because the tokenizer is loaded")
        elif given is None:
            setattr(options, name, SETTINGS[name] if trained is None else trained)
        elif trained not in (None, given):
            say(f"--{name} {given} is used, although the model was trained with {trained}")


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


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase, line_end: str) -> torch.LongTensor:
    """Encode the beginning of a text as one sequence `[1, T]`; its last line continues."""
    *lines, last = prompt.split("\n")
    stream = encode(lines, tokenizer, line_end)
    last = last if line_end == "newline" else last.lstrip()
    ids = tokenizer(last, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.cat([stream, torch.tensor(ids, dtype=torch.long)])[None]


def held_out(stream: torch.LongTensor, share: float) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Return the first part of a stream of tokens, and its last `share`."""
    cut = math.ceil(len(stream) * (1 - share))
    return stream[:cut], stream[cut:]


def pack_cache(cache: StateCache) -> list[dict[str, Any]]:
    """Return the tensors of each layer of a cache and the number of their positions, for `unpack_cache`."""
    return [
        {"length": layer.seen, **{name: tensor.detach().clone() for name, tensor in layer.tensors.items()}}
        for layer in cache.layers
    ]


def unpack_cache(model: PreTrainedModel, layers: list[dict[str, Any]]) -> StateCache:
    """Return the cache of `pack_cache`."""
    cache = new_cache(model)
    for layer, state in zip(cache.layers, layers, strict=True):
        layer.store(**state)
    return cache


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


def draw_windows(stream: torch.LongTensor, length: int, seed: int, change: Change | None = None) -> Redrawn:
    """Return blocks of `length` tokens at random positions of a stream, with the tokens that follow each token.

    `change` may modify them.
    """
    if len(stream) <= length:
        fail(f"the text has {len(stream)} tokens, too few for blocks of {length}; reduce --block_size")

    def cut(_: int, numbers: torch.Generator) -> dict[str, torch.Tensor]:
        block = _segment(stream, int(torch.randint(len(stream) - length, (), generator=numbers)), length)
        return change(block, numbers) if change else block

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
        start = 0
        while start < length:
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
            past = output.get("cache")
            if past is None and end < length:  # some models of transformers, such as BERT, have none with labels
                segment = context
                continue
            start = end
            summed += output.loss.item() * targets.numel() * counts
            counted += targets.numel() * counts
    model.train(was_training)
    if training is not None:
        summed, counted = total([summed, counted], training)
    loss = summed / counted
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bits_per_token": loss / math.log(2)}
