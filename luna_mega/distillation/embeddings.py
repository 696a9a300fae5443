"""Training on a teacher's sentence vectors: vectors of long texts, lengths of texts, and numbers of rows."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from luna_mega.distillation.windows import split_windows

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@torch.no_grad()
def teacher_vectors(teacher: "SentenceTransformer", texts: Sequence[str], window: int) -> torch.Tensor:
    """Return the vectors `[B, d]` of texts; a text of more than `window` tokens has the mean over its windows."""
    batch = teacher.tokenizer(list(texts), padding=True, return_tensors="pt", verbose=False).to(teacher.device)
    windows = split_windows(batch["attention_mask"].bool(), window)
    return windows.mean(teacher(windows.inputs(batch))["sentence_embedding"])


def cut_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Return the first part of every text, which has at most `lengths` tokens, including those that mark its ends."""
    added = tokenizer.num_special_tokens_to_add()
    given = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    rows = zip(texts, given["offset_mapping"], lengths, strict=True)
    return [text[: max((end for _, end in ends[: length - added]), default=0)] for text, ends, length in rows]


class RandomRows(TrainerCallback):
    """Pack the texts of every training step into a random number of rows; between steps, the encoder has its own.

    Args:
        encoder: a Luna with `pack_method="importance"`.
        lengths: numbers of rows.

    Raises:
        ValueError: The encoder is another one.
    """

    def __init__(self, encoder: PreTrainedModel, lengths: Sequence[int]):
        if getattr(encoder.config, "pack_method", None) != "importance":
            raise ValueError(
                f"projection_lengths={list(lengths)} requires a Luna with pack_method='importance', got "
                f"{type(encoder).__name__}; convert an encoder with luna-mega distill"
            )
        self.encoder, self.lengths, self.saved = encoder, lengths, encoder.config.projection_length

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        # By the step, so that all processes and resumed runs have the same number.
        self._set(random.Random(f"{args.seed} {state.global_step}").choice(self.lengths))

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self._set(self.saved)

    def _set(self, rows: int) -> None:
        self.encoder.config.projection_length = rows
        for layer in self.encoder.encoder.layers:
            layer.attention.projection_length = rows
