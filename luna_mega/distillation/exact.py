"""Luna encoders that equal a trained encoder on texts of up to `projection_length` tokens; nothing is trained."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
from luna_mega.distillation.copying import CopyReport, copy_encoder
from luna_mega.distillation.families import Family, find_head
from luna_mega.distillation.loading import check_tokenizer, load_model
from luna_mega.distillation.originals import check_original
from luna_mega.distillation.students import student_config
from luna_mega.distillation.teachers import Teacher, check_teacher
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
_FIT_LENGTH, _FIT_TOKENS = 256, 4096  # tokens per text, and approximately per batch
_RIDGE = 1e-2
_LEAST = 1e-6  # lower bound of the attention that a token receives, before the logarithm
# Field of Luna -> the first of the teacher's fields that is set.
_DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "classifier_dropout": ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob"),
}
# Fields in which sentence-transformers stores the activation of the scores of a cross-encoder.
_SCORES = ("sentence_transformers", "sbert_ce_default_activation_function")


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
            raise ValueError(
                f"the teacher is a {name}, whose head Luna does not have; for the encoder only, save "
                f"AutoModel.from_pretrained(...) with its tokenizer, or set num_labels to fine-tune a new classifier"
            )
        return named

    @property
    def pads_positions(self) -> bool:
        """Whether positions depend on the padding token, as in RoBERTa."""
        module = self.module("positions")
        return module is not None and module.padding_idx is not None

    @torch.no_grad()
    def logits(self, batch: dict[str, Any], places: torch.Tensor | None = None) -> torch.Tensor:
        """Return the first output of the model, with one option per row of the batch for multiple choice."""
        inputs = self.inputs(batch)
        if find_head(self.model) == "ForMultipleChoice":
            inputs = {name: tensor[:, None] for name, tensor in inputs.items()}
        return self.model(**inputs)[0]


@dataclass
class ConversionReport:
    """Record of `from_teacher`.

    Args:
        copied: the copied weights.
        fit: for every layer the share of the variance of the log of received attention that the fitted salience
            explains; None = there were no texts, and the salience is 0.
        tokens: number of tokens of the fit.
    """

    copied: CopyReport
    fit: list[float] | None = None
    tokens: int = 0

    def __str__(self) -> str:
        if self.fit is None:
            fit = "salience: 0, which packs neighboring tokens evenly; pass texts to fit it"
        else:
            shares = ", ".join(f"{share:.2f}" for share in self.fit)
            fit = f"salience: fitted on {self.tokens:,} tokens, r2 per layer {shares}"
        left = [f"left: {name}" for name in self.copied.left]
        return "\n".join([f"copied: {len(self.copied.copied)} tensors", *left, fit])


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
    projection_length: int = 128,
    max_length: int = 4096,
    position_extension: str | None = "interpolate",
    texts: Iterable[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_labels: int | None = None,
) -> Converted:
    """Convert a trained encoder to a Luna model with linear time and memory.

    The model equals the teacher, up to rounding, for texts of up to `projection_length` tokens. Longer texts are packed
    by importance (`pack_method="importance"`), and are close to the teacher. The head is converted as well: masked
    language modeling, sequence and token classification, question answering and multiple choice. Padding does not
    affect the result: positions count the tokens that `attention_mask` keeps.

    Args:
        teacher: name on the Hub, folder, or model: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT or ELECTRA.
        projection_length: number of rows l that a layer packs a text into.
        max_length: longest text in tokens: `max_position_embeddings` of the model, and `model_max_length` of the
            tokenizer.
        position_extension: positions of texts longer than the teacher's table, see `LunaConfig`; None = such texts
            raise an error.
        texts: texts to fit the salience on, which decides how longer texts are packed. About 100 are enough.
        tokenizer: tokenizer of a teacher that is given as a model; only required for `texts`.
        num_labels: make a sequence classifier of that many labels for fine-tuning, 1 for regression. If the checkpoint
            has no such head, its output layer is new, and its dense layer is the pooling layer of a BERT.

    Returns:
        The model, the tokenizer, and a report.

    Raises:
        ValueError: The teacher is not supported or damaged, or an option is out of range.
        OSError: There is no such folder or model.

    Example:
        >>> model, tokenizer, report = from_teacher("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
    """
    numbers = {"projection_length": projection_length, "max_length": max_length, "num_labels": num_labels}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if isinstance(texts, str):
        raise ValueError(f"`texts` must be a list of texts, got the str {texts[:20]!r}; pass [text] for a single text")
    if isinstance(teacher, str):
        source = load_model(EncoderTeacher, teacher, num_labels, dtype=torch.float32)
        tokenizer = load_tokenizer(teacher) if tokenizer is None else tokenizer
    elif num_labels is None:
        source = EncoderTeacher(teacher)
    else:
        raise ValueError(
            f"num_labels={num_labels} requires the name or folder of the teacher; for a loaded teacher, load it with "
            f"AutoModelForSequenceClassification and num_labels={num_labels}"
        )
    if tokenizer is not None:
        check_tokenizer(source, tokenizer, same_padding=source.pads_positions)
    elif texts is not None:
        raise ValueError("`texts` require a `tokenizer` if the teacher is given as a model; pass the teacher's own")
    table = source.positions()
    if position_extension is None and table is not None and max_length > len(table):
        raise ValueError(
            f"max_length={max_length} exceeds the {len(table)} positions of the teacher; pass max_length={len(table)}, "
            "or position_extension='interpolate'"
        )
    # The padding token only marks positions that the mask drops, so that any token of the tokenizer can be it.
    padding = None if tokenizer is None else tokenizer.pad_token_id
    config = student_config(
        source,
        "luna",
        **({} if padding is None else {"pad_token_id": padding}),
        projection_length=projection_length,
        pack_method="importance",
        max_position_embeddings=max_length,
        position_extension=position_extension if table is None or max_length > len(table) else None,
        position_table_size=None if table is None or max_length == len(table) else len(table),
        type_vocab_size=len(source.tensors("token_types").get("weight", ())),
        **_dropouts(source.config),
        **{name: getattr(source.config, name) for name in _SCORES if hasattr(source.config, name)},
    )
    model = _CLASSES[find_head(source.model)](config).to(source.model.device, source.model.dtype).eval()
    report = ConversionReport(copy_encoder(source, model))
    if new := [name for name in report.copied.new if not name.endswith("salience")]:
        raise ValueError(f"the teacher has no weights for {len(new)} parameters ({new[0]}, ...); pass a complete model")
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)  # a tokenizer of the caller keeps its length
        if texts is not None:
            length = min(_FIT_LENGTH, source.max_length or _FIT_LENGTH)
            report.fit, report.tokens = fit_salience(source, model, _batches(tokenizer, texts, length))
        set_max_length(tokenizer, max_length)
    return Converted(model, tokenizer, report)


def _dropouts(config: PreTrainedConfig) -> dict[str, float]:
    """Return the dropout of Luna that corresponds to the teacher's."""
    given = {ours: [getattr(config, name, None) for name in names] for ours, names in _DROPOUTS.items()}
    return {ours: next((value for value in values if value is not None), 0.0) for ours, values in given.items()}


def _batches(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield padded batches of texts of similar lengths."""
    texts = list(texts)
    if not texts:
        raise ValueError("`texts` is empty; pass at least one text, or None")
    rows = sorted(tokenizer(texts, truncation=True, max_length=length)["input_ids"], key=len, reverse=True)
    while rows:
        count = max(1, _FIT_TOKENS // len(rows[0]))
        yield dict(tokenizer.pad({"input_ids": rows[:count]}, return_tensors="pt"))
        rows = rows[count:]


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
                received = (output.attentions[layer] * kept[:, None, :, None]).sum(dim=2).mean(dim=1)
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
