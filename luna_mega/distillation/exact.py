"""Luna encoders that equal a trained encoder on texts of up to `projection_length` tokens, without training."""

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import luna_mega
from luna_mega.distillation.agreement import Agreement
from luna_mega.distillation.copying import CopyReport, copy_encoder
from luna_mega.distillation.equality import SCORES, Differences, compare_models
from luna_mega.distillation.lengths import Lengths, Sizes, choose_lengths
from luna_mega.distillation.loading import check_tokenizer, find_teacher, load_weights, read_config
from luna_mega.distillation.parts import find_head
from luna_mega.distillation.teachers import Teacher
from luna_mega.distillation.windows import make_batches
from luna_mega.hub.folder import load_tokenizer, set_max_length

logger = logging.getLogger(__name__)
_FIT_TEXTS, _FIT_LENGTH = 500, 256  # texts at most, and tokens per text
_LEAST = 1e-6  # lower bound of the attention that a token receives, before the logarithm
# Field of Luna -> the first of the teacher's fields that is set.
_DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "classifier_dropout": ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob"),
}
_KEPT_FIELDS = (*SCORES, "output_hidden_states")
_LEFT = "the pooling layer for classifiers, which no output of this model depends on; num_labels converts a BERT's"


@dataclass
class ConversionReport:
    """Record of `from_teacher`; `fit` and `agreement` are None if there were no texts."""

    copied: CopyReport
    lengths: Lengths
    # For every layer, the share of the variance of the log of received attention that the fitted salience explains
    fit: list[float] | None = None
    tokens: int = 0  # number of tokens of the fit
    agreement: Agreement | None = None  # comparison with the teacher at several lengths
    # Largest differences from the teacher for texts of at most `projection_length` tokens, by kind of output; None =
    # not compared, because sentence-transformers is not installed
    differences: Differences = field(default_factory=dict)

    def __str__(self) -> str:
        if self.fit is None:
            fit = "salience: 0, which packs neighboring tokens evenly; pass texts to fit it"
        else:
            shares = ", ".join(f"{share:.2f}" for share in self.fit)
            fit = f"salience: fitted on {self.tokens:,} tokens, r2 per layer {shares}"
        left = [f"not copied: {', '.join(self.copied.left)} ({_LEFT})"] if self.copied.left else []
        unknown = "not compared; install sentence-transformers"
        found = [f"{name} {unknown if x is None else f'{x:.1e}'}" for name, x in self.differences.items()]
        largest = f"largest difference from the teacher: {', '.join(found)}"
        lines = [f"copied: {len(self.copied.copied)} tensors", *left, largest, fit]
        lines += [] if self.agreement is None else [str(self.agreement)]
        return "\n".join([*lines, self.lengths.note] if self.lengths.note else lines)


class Converted(NamedTuple):
    """Result of `from_teacher`."""

    model: PreTrainedModel  # in evaluation mode
    tokenizer: PreTrainedTokenizerBase | None  # the teacher's; None if a model without a tokenizer was given
    report: ConversionReport


def from_teacher(
    teacher: str | PreTrainedModel,
    projection_length: int | None = None,
    max_length: int | None = None,
    position_extension: str | None = "interpolate",
    texts: Iterable[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_labels: int | None = None,
) -> Converted:
    """Convert a trained encoder to a Luna model with linear time and memory.

    The model equals the teacher, up to rounding, for texts of up to `projection_length` tokens. Longer texts are packed
    by importance (`pack_method="importance"`). By default, no text is longer than the teacher's table of positions, and
    heads that read tokens (masked language modeling, token classification, question answering) equal the teacher for
    every text. docs/distillation.md has measurements for longer texts. The head is converted as well: the named ones,
    sequence classification and multiple choice. Padding does not affect the result: positions count the tokens that
    `attention_mask` keeps.

    Args:
        teacher: name on the Hub, folder, or model: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT or ELECTRA.
        projection_length: number of rows l that a layer packs a text into, at most `max_length`; None = 128, and
            `max_length` for a head that reads tokens.
        max_length: longest text in tokens: `max_position_embeddings` of the model, and `model_max_length` of the
            tokenizer; None = the number of positions of the teacher. Token classification requires at most that many.
        position_extension: positions of texts longer than the teacher's table, see `LunaConfig`; None = a larger
            `max_length` is an error. Without effect for the default `max_length`.
        texts: texts to fit the salience on, which decides how longer texts are packed. About 100 are enough, and at
            most 500 are used.
        tokenizer: tokenizer of a teacher that is given as a model; only required for `texts`.
        num_labels: make a sequence classifier of that many labels for fine-tuning, 1 for regression. If the checkpoint
            has no such head, its output layer is new, and its dense layer is the pooling layer of a BERT.

    Returns:
        The model, the tokenizer, and a report.

    Raises:
        ValueError: There is no such folder or model, the teacher is not supported or damaged, an option is out of
            range, or the model differs from the teacher.

    Example:
        >>> model, tokenizer, report = from_teacher("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
    """
    sizes = (projection_length, max_length, position_extension)
    if isinstance(teacher, str):
        source, tokenizer = load_source(find_teacher(teacher), sizes, num_labels, tokenizer)
    elif num_labels is None:
        source = Teacher(teacher)
    else:
        raise ValueError(
            f"num_labels={num_labels} requires the name or folder of the teacher; for a loaded teacher, load it with "
            f"AutoModelForSequenceClassification and num_labels={num_labels}"
        )
    return convert_encoder(source, tokenizer, sizes, texts)


def load_source(
    name: str, sizes: Sizes, num_labels: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Teacher, PreTrainedTokenizerBase]:
    """Return a teacher and its tokenizer, from a folder or the Hub, after a check of the options of `from_teacher`."""
    if num_labels is not None and num_labels < 1:
        raise ValueError(f"num_labels must be at least 1, got {num_labels}")
    config, kind = read_config(name, num_labels, {})
    choose_lengths(config, find_head(kind), sizes)
    logger.info("reading the teacher")
    tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
    return load_weights(name, config, kind, num_labels, {}, dtype=torch.float32), tokenizer


def convert_encoder(
    source: Teacher, tokenizer: PreTrainedTokenizerBase | None, sizes: Sizes, texts: Iterable[str] | None = None
) -> Converted:
    """Convert a loaded teacher; see `from_teacher`."""
    head = find_head(source.model)
    lengths = choose_lengths(source.config, head, sizes)
    if isinstance(texts, str):
        raise ValueError(f"`texts` must be a list of texts, got the str {texts[:20]!r}; pass [text] for a single text")
    texts = None if texts is None else list(texts)
    if texts is not None and not texts:
        raise ValueError("`texts` is empty; pass at least one text, or None")
    if tokenizer is not None:
        check_tokenizer(source, tokenizer)
    elif texts is not None:
        raise ValueError("`texts` require a `tokenizer` if the teacher is given as a model; pass the teacher's own")
    config = _luna_config(source, None if tokenizer is None else tokenizer.pad_token_id, lengths)
    model = getattr(luna_mega, f"Luna{head or 'Model'}")(config)
    model.to(source.model.device, source.model.dtype).eval()
    report = ConversionReport(copy_encoder(source, model), lengths)
    if new := [name for name in report.copied.new if not name.endswith("salience")]:
        raise ValueError(f"the teacher has no weights for {len(new)} parameters ({new[0]}, ...); pass a complete model")
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)  # a tokenizer of the caller keeps its length
        if texts is not None:
            chosen = texts[:: -(-len(texts) // _FIT_TEXTS)]
            logger.info("fitting the salience on %d texts", len(chosen))
            batches = make_batches(tokenizer, chosen, min(_FIT_LENGTH, lengths.table))
            report.fit, report.tokens = fit_salience(source, model, batches)
        set_max_length(tokenizer, lengths.max_length)
    report.differences = compare_models(source, model)
    return Converted(model, tokenizer, report)


def _luna_config(teacher: Teacher, padding: int | None, lengths: Lengths) -> luna_mega.LunaConfig:
    """Return the configuration of a Luna with the sizes and options of the teacher.

    `padding` is the padding token of the tokenizer; None = the teacher's. It only marks positions that the mask drops,
    so that any token can be the padding token.
    """
    config = teacher.config
    if padding is None:
        padding = getattr(config, "pad_token_id", None) or 0
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    names += ("initializer_range", *_KEPT_FIELDS)
    if find_head(teacher.model) not in ("", "ForMaskedLM"):
        names += ("id2label", "label2id", "problem_type")
    dropouts = {ours: [getattr(config, name, None) for name in theirs] for ours, theirs in _DROPOUTS.items()}
    types = teacher.module("token_types")
    return luna_mega.LunaConfig(
        **{name: getattr(config, name) for name in names if hasattr(config, name)},
        **{ours: next((value for value in values if value is not None), 0.0) for ours, values in dropouts.items()},
        projection_length=lengths.projection_length,
        max_position_embeddings=lengths.max_length,
        position_table_size=None if lengths.max_length == lengths.table else lengths.table,
        position_extension=lengths.position_extension,
        pack_method="importance",
        pad_token_id=padding,
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_id=getattr(config, "eos_token_id", None),
        # Luna's table starts after the row of the padding token, which may be one of the last tokens here.
        first_position=None if teacher.family.padded or padding == 0 else 0,
        embedding_size=config.embedding_size if teacher.module("embedding_projection") is not None else None,
        type_vocab_size=0 if types is None else len(types.weight),
        intermediate_size=len(teacher.module("fc1", 0).weight),
        hidden_act=teacher.activation,
        layer_norm_eps=getattr(config, "layer_norm_eps", 1e-12),
        embedding_norm=True,
        pre_norm=False,
        tie_key_value=False,
        classifier_activation=teacher.family.class_activation,
        classifier_num_layers=1,
        pooling="cls",
    )


@torch.no_grad()
def fit_salience(
    teacher: Teacher, student: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]], ridge: float = 1e-2
) -> tuple[list[float], int]:
    """Fit the salience of a student with `pack_method="importance"` in closed form.

    The salience `w` of a layer is the ridge regression of the log of the attention that a token receives in the
    teacher's layer (sum over queries, mean over heads) on the input state of the layer. Only Gram matrices are stored.

    Args:
        teacher: the teacher, with the same layers as the student.
        student: the student; the salience of every layer is replaced.
        batches: `input_ids` and `attention_mask` `[B, T]`, and `token_type_ids` if the teacher has them.
        ridge: strength of the regularization, as a share of the mean square of the states.

    Returns:
        The share of the variance that is explained, for every layer, and the number of tokens.
    """
    body, count = teacher.model.base_model, len(teacher.layers)
    size = teacher.config.hidden_size + 2
    gram = torch.zeros(count, size, size, dtype=torch.float64, device=teacher.model.device)
    before, tokens = teacher.config._attn_implementation, 0
    teacher.model.set_attn_implementation("eager")  # the others return no weights
    try:
        for batch in batches:
            inputs = {name: x.to(teacher.model.device) for name, x in teacher.inputs(batch).items()}
            kept = inputs["attention_mask"].bool()
            tokens += int(kept.sum())
            output = body(**inputs, output_hidden_states=True, output_attentions=True)
            for layer in range(count):
                received = (output.attentions[layer].float() * kept[:, None, :, None]).sum(dim=2).mean(dim=1)
                target = received[kept].clamp(min=_LEAST).log()[:, None]
                states = output.hidden_states[layer][kept]
                rows = torch.cat([states, torch.ones_like(target), target], dim=1).double()
                gram[layer] += rows.T @ rows
    finally:
        teacher.model.set_attn_implementation(before)
    if not tokens:
        raise ValueError("the batches to fit the salience on have no tokens; pass at least one text")
    solved = [_solve(matrix, ridge) for matrix in gram]
    layers: Iterable[nn.Module] = student.base_model.encoder.layers
    for layer, (weight, _) in zip(layers, solved, strict=True):
        layer.attention.salience.copy_(weight)
    return [share for _, share in solved], tokens


def _solve(gram: torch.Tensor, ridge: float) -> tuple[torch.Tensor, float]:
    """Solve a ridge regression; return its weights `[d]` and the explained share of the variance.

    `gram` is the Gram matrix of the states, a constant 1 and the target.
    """
    square, moment, total = gram[:-1, :-1], gram[:-1, -1:], gram[-1, -1]
    penalty = ridge * square.diagonal().mean() * torch.eye(len(square)).to(square)
    # One layer at a time: the batched `torch.linalg.solve` fails with two threads in PyTorch 2.13.
    solution = torch.cholesky_solve(moment, torch.linalg.cholesky(square + penalty))
    error = total - (2 * solution.T @ moment - solution.T @ square @ solution).squeeze()
    variance = total - gram[-2, -1] ** 2 / gram[-2, -2]
    return solution[:-1, 0], (1 - error / variance.clamp(min=1e-12)).item()
