"""The numbers and texts that the page of `luna-mega demo` shows, without the page."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

from luna_mega.errors import ConversionError
from luna_mega.hub.card import task_of
from luna_mega.hub.folder import TARGET_FOLDER, largest_id, position_limit, read_folder, read_tokenizer
from luna_mega.kernels.api import complex_ema, ema_coefficients

TASKS = ("fill-mask", "text-classification", "text-generation", "translation")
LONGEST = 512  # tokens of a text whose weights are shown
LONGEST_TEXT = 50_000  # characters that the page reads at once


@dataclass(frozen=True)
class LunaWeights:
    """Attention weights of one text of T tokens in a Luna of N layers, on the CPU.

    `unpack` `[N, heads, T, L]` is how much a token reads from each row of P; `pack` `[N, pack heads, L, T]` how much a
    row takes from each token, None for a decoder, which packs no weighted mean.
    """

    tokens: list[str]
    unpack: torch.Tensor
    pack: torch.Tensor | None

    def through(self, layer: int, token: int) -> torch.Tensor:
        """Return how much a token reads from every token by way of P, `[T]`, with the mean weights of the heads."""
        return self.unpack[layer, :, token].mean(0) @ self.pack[layer].mean(0)


@dataclass(frozen=True)
class MegaWeights:
    """Attention weights of one text of T tokens in a Mega or Megalodon of N layers, `[N, T, T]`, on the CPU.

    They are the mean of the heads, and 0 outside of the chunks of `chunk` tokens; None = one chunk holds all tokens.
    """

    tokens: list[str]
    attention: torch.Tensor
    chunk: int | None


class Demo:
    """A model with everything that its page shows.

    Args:
        folder: what `luna-mega convert` or `save_pretrained` wrote, with its tokenizer.

    Raises:
        ConversionError: not such a folder, no tokenizer or one of another model, or a model whose task has no page.
    """

    def __init__(self, folder: str | Path):
        source = read_folder(folder)
        self.name, self.model_class = source.path.resolve().name, source.model_class.__name__
        self.task = task_of(self.model_class, source.config)
        if self.task not in TASKS:
            raise ConversionError(f"{folder}: holds a {self.model_class}; the demo shows models for {', '.join(TASKS)}")
        self.tokenizer = read_tokenizer(source.path)
        if (largest := largest_id(self.tokenizer)) >= source.config.vocab_size:
            raise ConversionError(
                f"{folder}: the tokenizer has token id {largest}, but the model has vocab_size = "
                f"{source.config.vocab_size}; copy the model's tokenizer there"
            )
        if self.task == "fill-mask" and self.tokenizer.mask_token is None:
            raise ConversionError(f"{folder}: the tokenizer has no mask token, and a {self.model_class} needs one")
        target = source.path / TARGET_FOLDER
        self.target_tokenizer = read_tokenizer(target) if target.is_dir() else self.tokenizer
        self.model = source.load()
        if torch.cuda.is_available():
            self.model.cuda()
        self.is_luna = self.model.config.model_type.startswith("luna")
        self.is_megalodon = self.model.config.model_type == "megalodon"
        self.limit = position_limit(self.body.config)
        self.look = functools.lru_cache(maxsize=4)(self._look)

    @property
    def is_translator(self) -> bool:
        """Return whether the model is an encoder-decoder."""
        return self.model.config.is_encoder_decoder

    @property
    def body(self) -> PreTrainedModel:
        """Return the model without its head; for an encoder-decoder, the encoder."""
        return self.model.get_encoder() if self.is_translator else self.model.base_model

    @functools.cached_property
    def score(self) -> Callable[[str], dict[str, float]]:
        """Return the function from a text to its scores: of the words for the one mask in it, or of the classes."""
        run = pipeline(self.task, model=self.model, tokenizer=self.tokenizer)

        def fill(text: str) -> dict[str, float]:
            _check_length(text)
            mask = self.tokenizer.mask_token
            if text.count(mask) != 1:
                raise ValueError(
                    f"write {mask} once, where a word is to be filled in; it is there {text.count(mask)} times"
                )
            rows = reversed(run(text, top_k=8))  # the likelier of two tokens that look alike is kept
            return {row["token_str"].strip() or repr(row["token_str"]): row["score"] for row in rows}

        def classify(text: str) -> dict[str, float]:
            _check_length(text)
            if not text.strip():
                raise ValueError("write a text to classify")
            return {row["label"]: row["score"] for row in run(text, top_k=None, truncation=self.limit is not None)}

        return fill if self.task == "fill-mask" else classify

    def write(self, text: str, max_new_tokens: int = 100, temperature: float = 0.0) -> Iterator[str]:
        """Yield the text that the model writes so far: what follows `text`, or its translation.

        Args:
            text: not empty.
            max_new_tokens: fewer are written where the model ends its text, or has no more positions.
            temperature: 0 = always the likeliest token, else tokens are drawn.

        Raises:
            ValueError: the text has no tokens or too many.
        """
        inputs = self._encode(text, special=self.is_translator)
        length = inputs["input_ids"].shape[1]
        room = None if self.limit is None or self.is_translator else self.limit - length
        if room is not None and room < 1:
            raise ValueError(f"the text has {length} tokens, and the model {self.limit} positions: shorten it")
        options = {"max_new_tokens": max_new_tokens if room is None else min(max_new_tokens, room)}
        options |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        streamer = TextIteratorStreamer(self.target_tokenizer, skip_prompt=True, skip_special_tokens=True)
        yield from _stream(self.model, streamer, **inputs, **options)

    def _look(self, text: str) -> LunaWeights | MegaWeights:
        """Return the attention weights of the first `LONGEST` tokens of a text; of two stacks, the encoder's."""
        inputs = self._encode(text, longest=min(LONGEST, self.limit or LONGEST))
        asked = {"output_attentions": True} | ({"output_packed_attentions": True} if self.is_luna else {})
        with torch.no_grad():
            output = self.body(**inputs, **asked)
        tokens = [self._shown(token) for token in inputs["input_ids"][0].tolist()]
        attentions = torch.stack(output.attentions)[:, 0].float().cpu()
        if not self.is_luna:
            chunks = attentions.mean(1) if self.is_megalodon else attentions
            return MegaWeights(tokens, _place_chunks(chunks, len(tokens)), self.body.config.attention_chunk)
        packed = None if self.body.config.is_decoder else torch.stack(output.packed_attentions)[:, 0].float().cpu()
        return LunaWeights(tokens, attentions, packed)

    @torch.no_grad()
    def kernels(self, layer: int, length: int = 128) -> torch.Tensor:
        """Return the moving average of a layer of Mega or Megalodon as a convolution, `[directions, D, length]`.

        Number j of a row is the weight of the token j places back; in the second direction, ahead.
        """
        if self.is_megalodon:
            average = self.body.layers[layer].mega.cema
            parameters = (average.alpha[..., 0], average.delta[..., 0], average.theta[:, 0, 0], average.gamma)
            impulse = average.alpha.new_zeros(1, length, self.body.config.hidden_size)
            impulse[:, 0] = 1.0
            return complex_ema(impulse, *parameters).mT.float().cpu()
        average = self.body.layers[layer].mega_layer.ema_gate
        logits = (average.damping_factor, average.decay_factor, average.ema_expansion_matrix)
        parameters = (*(x.squeeze(-1) for x in logits), average.kernel_projection_matrix)
        change, weight_in, weight_out = ema_coefficients(*parameters, dtype=torch.float64)
        powers = (change + 1.0)[..., None] ** torch.arange(length, device=change.device)
        kernels = torch.einsum("rn,rnt->rt", weight_in * weight_out, powers)
        return kernels.unflatten(0, (-1, self.body.config.hidden_size)).float().cpu()

    def _encode(self, text: str, special: bool = True, longest: int | None = None) -> dict[str, torch.Tensor]:
        _check_length(text)
        cut = {} if longest is None else {"truncation": True, "max_length": longest}
        inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=special, **cut)
        if not text.strip() or inputs["input_ids"].shape[1] == 0:
            raise ValueError("write a text first")
        ids = inputs["input_ids"].to(self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _shown(self, token: int) -> str:
        text = self.tokenizer.decode([token]) or self.tokenizer.convert_ids_to_tokens(token)
        return text.replace("\n", "⏎") if text.strip(" ") else "␣" * len(text)


def _check_length(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the text has {len(text):,} characters, and the page reads {LONGEST_TEXT:,}: shorten it")


def _stream(model, streamer: TextIteratorStreamer, **options) -> Iterator[str]:
    """Yield what the model has written so far; when nobody listens any more, it stops at the next token."""
    stopped, failures, text = threading.Event(), [], ""

    def write():
        try:
            stops = StoppingCriteriaList([lambda ids, scores: torch.full(ids.shape[:1], stopped.is_set())])
            model.generate(streamer=streamer, stopping_criteria=stops, **options)
        except Exception as error:  # raised again in the thread that reads the stream
            failures.append(error)
            streamer.end()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        for part in streamer:
            if part:
                text += part
                yield text
    finally:
        stopped.set()
        thread.join()
    if failures:
        raise failures[0]


def _place_chunks(attentions: torch.Tensor, length: int) -> torch.Tensor:
    """Return weights `[N, chunks, C, C]` as `[N, T, T]`, 0 between chunks."""
    layers, _, size, _ = attentions.shape
    placed = attentions.new_zeros(layers, length, length)
    for index, start in enumerate(range(0, length, size)):
        end = min(start + size, length)
        placed[:, start:end, start:end] = attentions[:, index, : end - start, : end - start]
    return placed
