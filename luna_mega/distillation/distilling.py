"""Distillation of the complete model with labels and the teacher's distribution at the predicted positions."""

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

_ROWS = 1024  # rows of float32 logits at a time


class Distilled(NamedTuple):
    """Losses of one batch.

    Args:
        loss: `(1 - share) * labels + share * teacher`, the training loss.
        labels: Cross-entropy with the labels, or the loss of a classifier.
        teacher: Squared temperature times the divergence of the student's distribution from the teacher's.
        logits: Logits of the student, `[M, vocab_size]` at the M predicted positions, or `[B, num_labels]`.
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

    Teacher and student only compute logits at the predicted positions. The losses are computed in float32 for 1,024
    positions at a time, which limits the memory for vocabularies of 250,000 tokens. With `share=0` the teacher is not
    called, and the batch may exceed its length limit.

    The student is called once, so it can be wrapped by DDP or FSDP2. Its width and depth may differ from the teacher's.

    Args:
        teacher: the teacher of the student.
        student: model, possibly wrapped.
        batch: `input_ids` `[B, T]`, `attention_mask` if there is padding, and `labels`: `[B, T]` with -100 = ignored
            (shifted by a causal model), or `[B]` for a classifier.
        share: weight of the teacher's loss, from 0 to 1.
        temperature: divisor of the logits in the teacher's loss.
        num_items_in_batch: number of predicted positions, or of labels of a classifier, in all batches of a step, by
            which the losses are divided; None = the number in this batch.

    Raises:
        ValueError: If labels are missing, share or temperature is out of range, or the batch exceeds the length limit
            of teacher or student; see also `check_pair`.
    """
    if not 0.0 <= share <= 1.0 or not 0.0 < temperature < float("inf"):
        raise ValueError(f"`share` must be from 0 to 1 and `temperature` above 0, got {share} and {temperature}")
    if batch.get("labels") is None:
        raise ValueError(
            "the batch has no `labels`; add the masked tokens, the next tokens, or the classes of the sequences"
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
        reference = teacher.logits(batch, places) if share else None
        own_loss, theirs = _token_losses(got, reference, targets[places], temperature)
        scale = 1.0 / max(1, len(got) if num_items_in_batch is None else num_items_in_batch)
    own_loss, theirs = own_loss * scale, theirs * scale
    return Distilled((1.0 - share) * own_loss + share * theirs, own_loss.detach(), theirs.detach(), got.detach())


def _token_losses(
    got: torch.Tensor, reference: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of both losses over logits `[M, V]` and targets `[M]`."""

    def of_rows(got, reference, targets):
        got = got if got.dtype == torch.float64 else got.float()
        own_loss = functional.cross_entropy(got, targets, reduction="sum")
        if reference is None:
            return own_loss, 0.0 * own_loss
        return own_loss, _divergence(got, reference.to(got.dtype), temperature)

    starts = range(0, max(1, len(got)), _ROWS)
    parts = []
    for start in starts:
        rows = slice(start, start + _ROWS)
        taken = (got[rows], None if reference is None else reference[rows], targets[rows])
        parts.append(of_rows(*taken) if len(starts) == 1 else checkpoint(of_rows, *taken, use_reentrant=False))
    return tuple(torch.stack(losses).sum() for losses in zip(*parts, strict=True))


def _divergence(got: torch.Tensor, reference: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the sum over rows of the squared temperature times KL(teacher || student)."""
    got, reference = (functional.log_softmax(x / temperature, dim=-1) for x in (got, reference))
    return temperature**2 * functional.kl_div(got, reference, reduction="sum", log_target=True)


def _label_loss(own: Parts, got: torch.Tensor, reference: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the mean loss of a classifier's logits `[B, C]` with respect to the teacher's."""
    kind = own.config.problem_type
    if kind == "regression" or (kind is None and own.config.num_labels == 1):
        return functional.mse_loss(got, reference)
    if kind == "multi_label_classification":
        scores = (reference / temperature).sigmoid()
        return temperature**2 * functional.binary_cross_entropy_with_logits(got / temperature, scores)
    return _divergence(got, reference, temperature) / len(got)
