"""Measure the agreement of a converted encoder with its teacher, on texts of several lengths."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_mega.distillation.lengths import TOKEN_HEADS, Lengths
from luna_mega.distillation.parts import find_head
from luna_mega.distillation.sentences import SentenceModules
from luna_mega.distillation.teachers import Teacher
from luna_mega.distillation.windows import Windows, make_batches, split_windows

logger = logging.getLogger(__name__)
_TEXTS, _TOKENS, _FEWEST = 64, 100_000, 8  # texts per length: at most 64, and fewer if they are long
_READ = 2000  # texts that are tokenized to find long ones
_OUTSIDE = "O"  # label of tokens that a token classifier finds nothing in
Batches = Iterable[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Agreement:
    """Agreement with the teacher by length."""

    # For every `length`: `texts` (their number), `windows` (whether the teacher read windows), and the measured values
    rows: list[dict[str, Any]]
    missing: list[int]  # lengths for which there were too few texts that are longer than the previous length

    def __str__(self) -> str:
        lines = []
        if self.rows:
            names = [name for name in self.rows[0] if name not in ("length", "texts", "windows")]
            lines += ["agreement with the teacher on the texts, truncated to these lengths:", ""]
            lines += [f"| tokens | texts | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
            for row in self.rows:
                length = f"{row['length']:,}" + " (mean of the teacher's windows)" * row["windows"]
                values = " | ".join("-" if row[name] is None else f"{row[name]:.3f}" for name in names)
                lines.append(f"| {length} | {row['texts']} | {values} |")
            lines.append("")
        if self.missing:
            lengths = ", ".join(f"{length:,}" for length in self.missing)
            lines.append(f"not compared, because too few of the texts are longer: {lengths} tokens")
        return "\n".join(lines)


@torch.no_grad()
def compare_lengths(
    teacher: Teacher,
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    lengths: Lengths,
    modules: SentenceModules | None = None,
    vectors: bool = False,
) -> Agreement:
    """Compare a student with its teacher at l, 2 l, the teacher's table and the longest text.

    For an encoder, the values are the mean cosine of the vectors, from which the teacher's mean is subtracted, and the
    share of texts with the same nearest neighbor. For a head, they are the share of equal predictions: of texts, of
    answers, or of tokens, without the tokens that both label `O`. Scores without labels have the share of pairs of
    texts in the same order. Beyond the table, the teacher reads windows: vectors and scores are their mean.

    Of `texts`, 2,000 are read. At each length, up to 64 of those that are longer than the previous length are compared.
    `modules` are the teacher's modules of sentence-transformers; `vectors` compares vectors although there is a head.
    """
    head = find_head(student)
    by_vectors = vectors or not head or bool(modules and modules.pooling)
    texts = texts[:: -(-len(texts) // _READ)]
    sizes = [len(ids) for ids in tokenizer(list(texts), truncation=True, max_length=lengths.max_length)["input_ids"]]
    least = 3 if by_vectors or _gives_scores(student) else 1
    rows, missing, shorter = [], [], 0
    steps = (lengths.projection_length, 2 * lengths.projection_length, lengths.table, lengths.max_length)
    for length in sorted({min(step, lengths.max_length) for step in steps}):
        chosen = [text for text, size in zip(texts, sizes, strict=True) if size > shorter]
        count = min(len(chosen), _TEXTS, max(_FEWEST, _TOKENS // length))
        shorter = length
        if count < least:
            missing.append(length)
            continue
        chosen = [chosen[index * len(chosen) // count] for index in range(count)]
        logger.info("comparing the model with its teacher on %d texts of up to %d tokens", count, length)
        batches = make_batches(tokenizer, chosen, length, student.device)
        if by_vectors:
            values = _compare_vectors(batches, teacher, student, lengths, modules)
        else:
            values = _compare_predictions(batches, teacher, student, lengths)
        rows.append({"length": length, "texts": count, "windows": length > lengths.table} | values)
    return Agreement(rows, missing)


def _compare_vectors(
    batches: Batches, teacher: Teacher, student: PreTrainedModel, lengths: Lengths, modules: SentenceModules | None
) -> dict[str, float]:
    """Compare vectors; poolings that are not implemented here are replaced by the mean."""
    modules = modules if modules is not None and modules.embeds else SentenceModules(("mean",), normalizes=True)
    ours, theirs = [], []
    for batch in batches:
        mask = batch["attention_mask"].bool()
        windows = split_windows(mask, lengths.table)
        states = teacher.model.base_model(**windows.inputs(batch)).last_hidden_state
        mean = windows.mean(modules.embed(states, windows.mask))
        theirs.append(functional.normalize(mean, dim=-1) if modules.normalizes else mean)
        ours.append(modules.embed(student.base_model(**batch).last_hidden_state, mask))
    ours, theirs = torch.cat(ours).double(), torch.cat(theirs).double()
    center = theirs.mean(dim=0)
    cosine = functional.cosine_similarity(ours - center, theirs - center, dim=-1).mean()
    same = (_neighbors(ours) == _neighbors(theirs)).double().mean()
    return {"centered cosine": cosine.item(), "same nearest neighbor": same.item()}


def _neighbors(vectors: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest other vector, `[n]`."""
    normal = functional.normalize(vectors, dim=-1)
    return (normal @ normal.T).fill_diagonal_(-torch.inf).argmax(dim=-1)


def _compare_predictions(
    batches: Batches, teacher: Teacher, student: PreTrainedModel, lengths: Lengths
) -> dict[str, float | None]:
    """Compare the predictions of a head."""
    config, head = student.config, find_head(student)
    ours, theirs = [], []
    for batch in batches:
        windows = split_windows(batch["attention_mask"].bool(), lengths.table)
        own = _read(student, head, batch)
        given = _join(_read(teacher.model, head, windows.inputs(batch)), windows, batch, head)
        if head in ("ForMaskedLM", "ForTokenClassification"):
            kept = batch["attention_mask"].bool()
            own, given = own[kept], given[kept]
        elif head == "ForQuestionAnswering":  # start and end
            own, given = own.argmax(dim=1), given.argmax(dim=1)
        ours.append(own)
        theirs.append(given)
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    if _gives_scores(student):
        first, second = torch.combinations(torch.arange(len(ours), device=ours.device)).T
        own, given = (x.flatten()[first] > x.flatten()[second] for x in (ours, theirs))
        return {"pairs in the same order": _share(own == given)}
    if head == "ForSequenceClassification":
        multiple = config.problem_type == "multi_label_classification"
        ours, theirs = (x > 0 if multiple else x.argmax(dim=-1) for x in (ours, theirs))
    equal = ours == theirs
    outside = [index for index, label in config.id2label.items() if label == _OUTSIDE]
    if head == "ForTokenClassification" and outside:
        equal = equal[(ours != outside[0]) | (theirs != outside[0])]
    return {"equal predictions": _share(equal.all(dim=-1) if head == "ForQuestionAnswering" else equal)}


def _gives_scores(model: PreTrainedModel) -> bool:
    """Return whether the head returns one score per text, which is only used to rank texts."""
    head = find_head(model)
    return head == "ForMultipleChoice" or (head == "ForSequenceClassification" and model.config.num_labels == 1)


def _share(equal: torch.Tensor) -> float | None:
    return equal.double().mean().item() if equal.numel() else None


def _read(model: PreTrainedModel, head: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return scores `[B, C]` of texts, `[B, T, 2]` for answers, or the predicted classes `[B, T]` of tokens."""
    if head == "ForMultipleChoice":
        inputs = {name: tensor[:, None] for name, tensor in inputs.items()}
    output = model(**inputs)
    if head == "ForQuestionAnswering":
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits.argmax(dim=-1) if head in TOKEN_HEADS else output.logits


def _join(values: torch.Tensor, windows: Windows, batch: dict[str, torch.Tensor], head: str) -> torch.Tensor:
    """Return the values of texts, given the values of their windows: the mean, or the values of their tokens."""
    if head not in TOKEN_HEADS:
        return windows.mean(values)
    lowest = -torch.inf if values.is_floating_point() else 0
    joined = values.new_full((*batch["input_ids"].shape, *values.shape[2:]), lowest)
    rows = windows.owner[:, None].expand_as(windows.columns)
    joined[rows[windows.mask], windows.columns[windows.mask]] = values[windows.mask]
    return joined
