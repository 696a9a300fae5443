"""Luna encoders that equal a trained encoder on texts of up to `projection_length` tokens; nothing is trained."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from luna_mega import (
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForQuestionAnswering,
    LunaForSequenceClassification,
    LunaForTokenClassification,
    LunaModel,
)
from luna_mega.distillation.agreement import Agreement
from luna_mega.distillation.comparison import SCORES, Differences, compare_models
from luna_mega.distillation.copying import CopyReport, copy_encoder
from luna_mega.distillation.families import Family, find_head
from luna_mega.distillation.lengths import Lengths, choose_lengths
from luna_mega.distillation.loading import check_tokenizer, load_model
from luna_mega.distillation.originals import check_original
from luna_mega.distillation.students import student_config
from luna_mega.distillation.teachers import Teacher, check_teacher
from luna_mega.distillation.windows import make_batches
from luna_mega.errors import ConversionError
from luna_mega.training.models import load_tokenizer
from luna_mega.training.tokenizers import set_max_length

_CLASSES: dict[str, type[PreTrainedModel]] = {
    "": LunaModel,
    "ForMaskedLM": LunaForMaskedLM,
    "ForSequenceClassification": LunaForSequenceClassification,
    "ForTokenClassification": LunaForTokenClassification,
    "ForQuestionAnswering": LunaForQuestionAnswering,
    "ForMultipleChoice": LunaForMultipleChoice,
}
_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra")
_FIT_LENGTH = 256  # tokens per text
_RIDGE = 1e-2
_LEAST = 1e-6  # lower bound of the attention that a token receives, before the logarithm
# Field of Luna -> the first of the teacher's fields that is set.
_DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "classifier_dropout": ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob"),
}
_KEPT_FIELDS = (*SCORES, "output_hidden_states")


class EncoderTeacher(Teacher):
    """A trained encoder with absolute positions, with any head of `LunaFor...` or without a head.

    Raises:
        ValueError: The model is not supported; the message names the models that are.
    """

    heads = tuple(_CLASSES)

    def __init__(self, model: nn.Module, window: int | None = None):
        model = check_original(model)
        self.check(model.config)
        head = find_head(model)
        if head not in self.heads:
            raise ValueError(
                f"{type(model).__name__} has a head that Luna does not have; pass `model.base_model`, or a model with "
                f"one of the heads {', '.join(filter(None, self.heads))}"
            )
        super().__init__(model, window)
        config = self.config
        if head == "ForMaskedLM" and self.head_activation != self.activation:
            raise ValueError(
                f"the head of the teacher ({config.model_type}) has the activation {self.head_activation!r}, but its "
                f"layers have {self.activation!r}, and Luna has one for both; pass `model.base_model`"
            )
        summary = [getattr(config, f"summary_{name}", None) for name in ("type", "use_proj", "activation")]
        if head == "ForMultipleChoice" and config.model_type == "electra" and summary != ["first", True, "gelu"]:
            raise ValueError(
                f"the teacher (electra) summarizes options by {summary[0]!r} and {summary[2]!r}; only summary_type="
                "'first' with a projection and 'gelu' is supported"
            )

    @staticmethod
    def check(config: PreTrainedConfig) -> Family:
        family = check_teacher(config, _TYPES)
        if config.model_type not in _TYPES:
            raise ValueError(
                f"the teacher ({config.model_type}) does not have the layers and learned positions of BERT, so an "
                f"exact conversion is impossible; supported are {', '.join(_TYPES)}, for others see "
                "examples/run_distill.py"
            )
        return family

    @staticmethod
    def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
        bare = MODEL_MAPPING[type(config)]
        name = str((config.architectures or [bare.__name__])[0])
        named = bare if name == bare.__name__ else getattr(transformers, name, None)
        if not isinstance(named, type) or named is not bare and not name.endswith(tuple(filter(None, _CLASSES))):
            raise ConversionError(
                f"the teacher is a {name}, whose head Luna does not have; for the encoder only, save "
                "AutoModel.from_pretrained(...) with its tokenizer, or set num_labels to fine-tune a new classifier"
            )
        return named

    @property
    def pads_positions(self) -> bool:
        """Whether positions depend on the padding token, as in RoBERTa."""
        module = self.module("positions")
        return module is not None and module.padding_idx is not None

    def inputs(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the teacher's inputs of a batch `[B, T]` or, for multiple choice, `[B, options, T]`."""
        shape = batch["input_ids"].shape
        inputs = super().inputs({name: tensor.flatten(0, -2) for name, tensor in batch.items()})
        # DistilBERT does not reshape `position_ids`, and the others accept them as `[B * options, T]`.
        return {name: x if name == "position_ids" else x.reshape(shape) for name, x in inputs.items()}

    @torch.no_grad()
    def logits(self, batch: dict[str, Any], places: torch.Tensor | None = None) -> torch.Tensor:
        """Return the first output of the model, with one option per row of the batch for multiple choice."""
        if find_head(self.model) == "ForMultipleChoice":
            batch = {name: tensor[:, None] for name, tensor in batch.items()}
        return self.model(**self.inputs(batch))[0]


@dataclass
class ConversionReport:
    """Record of `from_teacher`.

    Args:
        copied: the copied weights.
        lengths: number of rows, longest text and positions.
        fit: for every layer the share of the variance of the log of received attention that the fitted salience
            explains; None = there were no texts, and the salience is 0.
        tokens: number of tokens of the fit.
        agreement: the comparison with the teacher at several lengths; None = there were no texts.
        differences: largest differences from the teacher for texts of at most `projection_length` tokens, by kind of
            output; None = not compared, because sentence-transformers is not installed.
    """

    copied: CopyReport
    lengths: Lengths
    fit: list[float] | None = None
    tokens: int = 0
    agreement: Agreement | None = None
    differences: Differences = field(default_factory=dict)

    def __str__(self) -> str:
        if self.fit is None:
            fit = "salience: 0, which packs neighboring tokens evenly; pass texts to fit it"
        else:
            shares = ", ".join(f"{share:.2f}" for share in self.fit)
            fit = f"salience: fitted on {self.tokens:,} tokens, r2 per layer {shares}"
        left = [f"left: {name}" for name in self.copied.left]
        unknown = "not compared; install sentence-transformers"
        found = [f"{name} {unknown if x is None else f'{x:.1e}'}" for name, x in self.differences.items()]
        largest = f"largest difference from the teacher: {', '.join(found)}"
        lines = [f"copied: {len(self.copied.copied)} tensors", *left, largest, fit]
        lines += [] if self.agreement is None else [str(self.agreement)]
        return "\n".join([*lines, self.lengths.note] if self.lengths.note else lines)


class Converted(NamedTuple):
    """Result of `from_teacher`.

    Args:
        model: the Luna model, in evaluation mode.
        tokenizer: the teacher's tokenizer; None if a model without a tokenizer was given.
        report: the copied weights and the fit.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
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
        projection_length: number of rows l that a layer packs a text into; None = 128, and `max_length` for a head that
            reads tokens.
        max_length: longest text in tokens: `max_position_embeddings` of the model, and `model_max_length` of the
            tokenizer; None = the number of positions of the teacher. Token classification requires at most that many.
        position_extension: positions of texts longer than the teacher's table, see `LunaConfig`; None = a larger
            `max_length` is an error. Without effect for the default `max_length`.
        texts: texts to fit the salience on, which decides how longer texts are packed. About 100 are enough.
        tokenizer: tokenizer of a teacher that is given as a model; only required for `texts`.
        num_labels: make a sequence classifier of that many labels for fine-tuning, 1 for regression. If the checkpoint
            has no such head, its output layer is new, and its dense layer is the pooling layer of a BERT.

    Returns:
        The model, the tokenizer, and a report.

    Raises:
        ValueError: The teacher is not supported or damaged, an option is out of range, or the model differs from the
            teacher.
        OSError: There is no such folder or model.

    Example:
        >>> model, tokenizer, report = from_teacher("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
    """
    if isinstance(teacher, str):
        source, tokenizer = load_source(teacher, num_labels, tokenizer)
    elif num_labels is None:
        source = EncoderTeacher(teacher)
    else:
        raise ValueError(
            f"num_labels={num_labels} requires the name or folder of the teacher; for a loaded teacher, load it with "
            f"AutoModelForSequenceClassification and num_labels={num_labels}"
        )
    return convert_encoder(source, tokenizer, projection_length, max_length, position_extension, texts)


def load_source(
    name: str, num_labels: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[EncoderTeacher, PreTrainedTokenizerBase]:
    """Return a teacher and its tokenizer, from a folder or the Hub; see `from_teacher`."""
    if num_labels is not None and num_labels < 1:
        raise ValueError(f"num_labels must be at least 1, got {num_labels}")
    source = load_model(EncoderTeacher, name, num_labels, dtype=torch.float32)
    return source, load_tokenizer(name) if tokenizer is None else tokenizer


def convert_encoder(
    source: EncoderTeacher,
    tokenizer: PreTrainedTokenizerBase | None,
    projection_length: int | None = None,
    max_length: int | None = None,
    position_extension: str | None = "interpolate",
    texts: Iterable[str] | None = None,
) -> Converted:
    """Convert a loaded teacher; see `from_teacher`."""
    lengths = choose_lengths(source, projection_length, max_length, position_extension)
    if isinstance(texts, str):
        raise ValueError(f"`texts` must be a list of texts, got the str {texts[:20]!r}; pass [text] for a single text")
    if tokenizer is not None:
        check_tokenizer(source, tokenizer, same_padding=source.pads_positions)
    elif texts is not None:
        raise ValueError("`texts` require a `tokenizer` if the teacher is given as a model; pass the teacher's own")
    # The padding token only marks positions that the mask drops, so that any token of the tokenizer can be it.
    padding = None if tokenizer is None else tokenizer.pad_token_id
    config = student_config(
        source,
        "luna",
        **({} if padding is None else {"pad_token_id": padding}),
        **lengths.fields(),
        pack_method="importance",
        type_vocab_size=len(source.tensors("token_types").get("weight", ())),
        **_dropouts(source.config),
        **{name: getattr(source.config, name) for name in _KEPT_FIELDS if hasattr(source.config, name)},
    )
    model = _CLASSES[find_head(source.model)](config).to(source.model.device, source.model.dtype).eval()
    report = ConversionReport(copy_encoder(source, model), lengths)
    if new := [name for name in report.copied.new if not name.endswith("salience")]:
        raise ValueError(f"the teacher has no weights for {len(new)} parameters ({new[0]}, ...); pass a complete model")
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)  # a tokenizer of the caller keeps its length
        if texts is not None:
            if not (texts := list(texts)):
                raise ValueError("`texts` is empty; pass at least one text, or None")
            batches = make_batches(tokenizer, texts, min(_FIT_LENGTH, lengths.table))
            report.fit, report.tokens = fit_salience(source, model, batches)
        set_max_length(tokenizer, lengths.max_length)
    report.differences = compare_models(source, model)
    return Converted(model, tokenizer, report)


def _dropouts(config: PreTrainedConfig) -> dict[str, float]:
    """Return the dropout of Luna that corresponds to the teacher's."""
    given = {ours: [getattr(config, name, None) for name in names] for ours, names in _DROPOUTS.items()}
    return {ours: next((value for value in values if value is not None), 0.0) for ours, values in given.items()}


@torch.no_grad()
def fit_salience(
    teacher: Teacher, student: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]], ridge: float = _RIDGE
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
    """Return the weights `[d]` and the explained share of the variance, of the Gram matrix of states, 1 and target."""
    square, moment, total = gram[:-1, :-1], gram[:-1, -1:], gram[-1, -1]
    penalty = ridge * square.diagonal().mean() * torch.eye(len(square)).to(square)
    # One layer at a time: the batched `torch.linalg.solve` fails with two threads in PyTorch 2.13.
    solution = torch.cholesky_solve(moment, torch.linalg.cholesky(square + penalty))
    error = total - (2 * solution.T @ moment - solution.T @ square @ solution).squeeze()
    variance = total - gram[-2, -1] ** 2 / gram[-2, -2]
    return solution[:-1, 0], (1 - error / variance.clamp(min=1e-12)).item()
