"""Weights, scores and texts that the page of `luna-mega demo` shows."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, StoppingCriteriaList, TextIteratorStreamer, pipeline

from luna_mega.errors import ConversionError
from luna_mega.hub.card import task_of
from luna_mega.hub.folder import TARGET_FOLDER, largest_id, position_limit, read_folder, read_tokenizer
from luna_mega.kernels.api import complex_ema, ema_coefficients

TASKS = ("fill-mask", "text-classification", "text-generation", "translation")
LONGEST = 512  # maximum number of tokens whose weights are shown
LONGEST_TEXT = 50_000  # maximum number of characters of an input


@dataclass(frozen=True)
class LunaWeights:
    """Attention weights of one text of T tokens in a Luna of N layers, on the CPU.

    Args:
        tokens: Text of each token.
        unpack: `[N, heads, T, L]`, weights of the tokens for the rows of P.
        pack: `[N, pack heads, L, T]`, weights of the rows of P for the tokens; None for a decoder and the
            position-aware pack.
    """

    tokens: list[str]
    unpack: torch.Tensor
    pack: torch.Tensor | None

    def through(self, layer: int, token: int) -> torch.Tensor:
        """Return the weights `[T]` of a token for all tokens through P, averaged over the heads."""
        return self.unpack[layer, :, token].mean(0) @ self.pack[layer].mean(0)


@dataclass(frozen=True)
class MegaWeights:
    """Attention weights of one text of T tokens in a Mega or Megalodon of N layers, `[N, T, T]`, on the CPU.

    They are averaged over the heads, and 0 outside of the chunks of `chunk` tokens. If `chunk` is None, there are no
    chunks.
    """

    tokens: list[str]
    attention: torch.Tensor
    chunk: int | None


class Demo:
    """A model and the functions of its page.

    Args:
        folder: Folder of `luna-mega convert` or `save_pretrained`, with its tokenizer.

    Raises:
        ConversionError: If the folder is invalid, has no tokenizer or another model's, or its task has no page.
    """

    def __init__(self, folder: str | Path):
        source = read_folder(folder)
        self.name, self.model_class = source.path.resolve().name, source.model_class.__name__
        self.task = task_of(self.model_class, source.config)
        if self.task not in TASKS:
            raise ConversionError(
                f"{folder}: contains a {self.model_class}; the demo supports the tasks {', '.join(TASKS)}"
            )
        self.tokenizer = read_tokenizer(source.path)
        if (largest := largest_id(self.tokenizer)) >= source.config.vocab_size:
            raise ConversionError(
                f"{folder}: the tokenizer has token id {largest}, but the model has vocab_size = "
                f"{source.config.vocab_size}; copy the model's tokenizer there"
            )
        if self.task == "fill-mask" and self.tokenizer.mask_token is None:
            raise ConversionError(f"{folder}: the tokenizer has no mask token, which {self.model_class} requires")
        target = source.path / TARGET_FOLDER
        self.target_tokenizer = read_tokenizer(target) if target.is_dir() else self.tokenizer
        self.model = source.load()
        if torch.cuda.is_available():
            self.model.cuda()
        self.is_luna = self.model.config.model_type.startswith("luna")
        # The position-aware pack and decoders have none.
        config = self.body.config
        self.has_pack_weights = self.is_luna and not config.is_decoder and config.pack_method == "attention"
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
        """Return the function from a text to its scores: of the tokens for its mask, or of the classes."""
        run = pipeline(self.task, model=self.model, tokenizer=self.tokenizer)

        def fill(text: str) -> dict[str, float]:
            _check_length(text)
            mask = self.tokenizer.mask_token
            if text.count(mask) != 1:
                raise ValueError(f"the text must contain {mask} exactly once, but contains it {text.count(mask)} times")
            rows = reversed(run(text, top_k=8))  # keeps the most likely of the tokens with the same text
            return {row["token_str"].strip() or repr(row["token_str"]): row["score"] for row in rows}

        def classify(text: str) -> dict[str, float]:
            _check_length(text)
            if not text.strip():
                raise ValueError("the text is empty; enter a text")
            return {row["label"]: row["score"] for row in run(text, top_k=None, truncation=self.limit is not None)}

        return fill if self.task == "fill-mask" else classify

    def write(self, text: str, max_new_tokens: int = 100, temperature: float = 0.0) -> Iterator[str]:
        """Yield the generated text after each token: the continuation of `text`, or its translation.

        Args:
            text: Prompt, or source text.
            max_new_tokens: Maximum number of new tokens, which the positions of the model also limit.
            temperature: 0 selects greedy decoding.

        Raises:
            ValueError: If the text has no tokens or too many.
        """
        inputs = self._encode(text, special=self.is_translator)
        length = inputs["input_ids"].shape[1]
        room = None if self.limit is None or self.is_translator else self.limit - length
        if room is not None and room < 1:
            raise ValueError(
                f"the text has {length} tokens, but the model has {self.limit} positions; shorten the text"
            )
        options = {"max_new_tokens": max_new_tokens if room is None else min(max_new_tokens, room)}
        options |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        streamer = TextIteratorStreamer(self.target_tokenizer, skip_prompt=True, skip_special_tokens=True)
        yield from _stream(self.model, streamer, **inputs, **options)

    def _look(self, text: str) -> LunaWeights | MegaWeights:
        """Return the attention weights of the first `LONGEST` tokens of a text, in the encoder if there is one."""
        inputs = self._encode(text, longest=min(LONGEST, self.limit or LONGEST))
        options = {"output_attentions": True} | ({"output_packed_attentions": True} if self.has_pack_weights else {})
        with torch.no_grad():
            output = self.body(**inputs, **options)
        tokens = [self._shown(token) for token in inputs["input_ids"][0].tolist()]
        attentions = torch.stack(output.attentions)[:, 0].float().cpu()
        if not self.is_luna:
            chunks = attentions.mean(1) if self.is_megalodon else attentions
            return MegaWeights(tokens, _place_chunks(chunks, len(tokens)), self.body.config.attention_chunk)
        packed = torch.stack(output.packed_attentions)[:, 0].float().cpu() if self.has_pack_weights else None
        return LunaWeights(tokens, attentions, packed)

    @torch.no_grad()
    def kernels(self, layer: int, length: int = 128) -> torch.Tensor:
        """Return the moving average of a layer of Mega or Megalodon as a convolution, `[directions, D, length]`.

        Element j is the weight of the token at distance j: in the past, or in the future for the second direction.
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
            raise ValueError("the text is empty; enter a text")
        ids = inputs["input_ids"].to(self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _shown(self, token: int) -> str:
        text = self.tokenizer.decode([token]) or self.tokenizer.convert_ids_to_tokens(token)
        return text.replace("\n", "⏎") if text.strip(" ") else "␣" * len(text)


def _check_length(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the text has {len(text):,} characters, but the limit is {LONGEST_TEXT:,}; shorten the text")


def _stream(model, streamer: TextIteratorStreamer, **options) -> Iterator[str]:
    """Yield the generated text after each token; if the consumer stops, the generation stops at the next token."""
    stopped, failures, text = threading.Event(), [], ""

    def write():
        try:
            stops = StoppingCriteriaList([lambda ids, scores: torch.full(ids.shape[:1], stopped.is_set())])
            model.generate(streamer=streamer, stopping_criteria=stops, **options)
        except Exception as error:  # raised again in the consuming thread
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
