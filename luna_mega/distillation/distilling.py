"""Distillation end to end: labels and the teacher's distribution, at the predicted positions alone."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from luna_mega.distillation.families import Parts
from luna_mega.distillation.students import check_pair
from luna_mega.distillation.teachers import Teacher, inputs_of
from luna_mega.modeling_common.label_checks import check_labels
from luna_mega.modeling_common.labels import count_kept, next_tokens

_ROWS = 1024  # of logits in float32 at a time


class Distilled(NamedTuple):
    """Losses of one batch.

    Args:
        loss: `(1 - share) labels + share * teacher`, the one to train on.
        labels: cross-entropy with the labels; of a classifier its own loss.
        teacher: squared temperature times the divergence of the student's distribution from the teacher's.
        logits: the student's, `[M, vocab_size]` at the M predicted positions, or `[B, num_labels]`.
    """

    loss: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor
    logits: torch.Tensor


def distill(
    teacher: Teacher,
    student: nn.Module,
    batch: dict[str, Any],
    share: float = 0.5,
    temperature: float = 1.0,
    num_items_in_batch: int | torch.Tensor | None = None,
) -> Distilled:
    """Return the losses of a batch.

    Teacher and student compute logits of the predicted positions alone, and what a loss needs in float32 is made for
    1,024 of them at a time, so that a vocabulary of 250,000 tokens fits. With `share=0` the teacher does not run, and
    the batch may be longer than it reads.

    The student is called once, as a whole, so that it may be wrapped by DDP or FSDP2. It may have another width and
    depth than the teacher.

    Args:
        student: a model, maybe wrapped.
        batch: `input_ids` `[B, T]`, `attention_mask` where there is padding, and `labels`: `[B, T]` with -100 = not
            predicted (a causal model shifts them), or `[B]` of a classifier.
        share: of the teacher's loss, from 0 to 1.
        temperature: divides the logits in the teacher's loss.
        num_items_in_batch: predicted positions, or labels of a classifier, of all batches that make one step, by which
            Trainer wants losses divided; None = those of this batch.

    Raises:
        ValueError: no labels, a share or a temperature out of range, a batch longer than teacher or student read; see
            also `check_pair`.
    """
    if not 0.0 <= share <= 1.0 or not 0.0 < temperature < float("inf"):
        raise ValueError(f"share must be from 0 to 1 and temperature a number above 0, got {share} and {temperature}")
    if batch.get("labels") is None:
        raise ValueError(
            "distill needs labels in the batch: the masked tokens, the next tokens, or the classes of the sequences"
        )
    own = check_pair(teacher, student, same_width=False)
    if own.is_classifier != teacher.is_classifier:
        raise ValueError("teacher and student must both classify sequences, or both predict tokens, to share a loss")
    types = "token_type_ids" in batch and bool(own.tensors("token_types"))
    inputs, labels = inputs_of(batch, types), batch["labels"]
    if own.is_classifier:
        outputs = student(**inputs, labels=labels)
        own_loss, got, items = outputs.loss, outputs.logits, len(labels)
        theirs = _label_loss(own, got.float(), teacher.logits(batch).float(), temperature) if share else 0.0 * own_loss
        scale = 1.0 if num_items_in_batch is None else items / max(1, num_items_in_batch)
    else:
        mask = inputs["attention_mask"].bool()
        check_labels("labels", labels, mask.shape)
        targets = next_tokens(labels, None, mask) if own.config.is_decoder else count_kept(labels, mask)
        places = targets != -100
        with own.logits_at(places):
            got = student(**inputs).logits
        want = teacher.logits(batch, places) if share else None
        own_loss, theirs = _token_losses(got, want, targets[places], temperature)
        scale = 1.0 / max(1, len(got) if num_items_in_batch is None else num_items_in_batch)
    own_loss, theirs = own_loss * scale, theirs * scale
    return Distilled((1.0 - share) * own_loss + share * theirs, own_loss.detach(), theirs.detach(), got.detach())


def _token_losses(
    got: torch.Tensor, want: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of both losses over logits `[M, V]` and targets `[M]`."""

    def of_rows(got, want, targets):
        got = got if got.dtype == torch.float64 else got.float()
        own_loss = functional.cross_entropy(got, targets, reduction="sum")
        if want is None:
            return own_loss, 0.0 * own_loss
        return own_loss, _divergence(got, want.to(got.dtype), temperature)

    starts = range(0, max(1, len(got)), _ROWS)
    parts = []
    for start in starts:
        rows = slice(start, start + _ROWS)
        taken = (got[rows], None if want is None else want[rows], targets[rows])
        parts.append(of_rows(*taken) if len(starts) == 1 else checkpoint(of_rows, *taken, use_reentrant=False))
    return tuple(torch.stack(losses).sum() for losses in zip(*parts, strict=True))


def _divergence(got: torch.Tensor, want: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the sum over rows of the squared temperature times KL(teacher || student)."""
    got, want = (functional.log_softmax(x / temperature, dim=-1) for x in (got, want))
    return temperature**2 * functional.kl_div(got, want, reduction="sum", log_target=True)


def _label_loss(own: Parts, got: torch.Tensor, want: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the mean loss of a classifier's logits `[B, C]` beside the teacher's."""
    kind = own.config.problem_type
    if kind == "regression" or (kind is None and own.config.num_labels == 1):
        return functional.mse_loss(got, want)
    if kind == "multi_label_classification":
        scores = (want / temperature).sigmoid()
        return temperature**2 * functional.binary_cross_entropy_with_logits(got / temperature, scores)
    return _divergence(got, want, temperature) / len(got)
