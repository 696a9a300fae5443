"""Compare a converted model, in memory or in a folder, with its teacher."""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luna_mega.distillation.parts import find_head
from luna_mega.distillation.sentences import SentenceModules, read_modules
from luna_mega.distillation.teachers import Teacher
from luna_mega.errors import ConversionError, reason, shown
from luna_mega.hub.folder import load_tokenizer, read_folder
from luna_mega.hub.samples import make_inputs, sample_inputs

logger = logging.getLogger(__name__)
Differences = dict[str, float | None]
# Largest difference that rounding explains, relative to the largest output if that is above 1.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_PADDED = 128  # longest text of a padded batch: the logits of a large vocabulary require much memory
# Fields in which sentence-transformers stores the activation of the scores of a cross-encoder.
SCORES = ("sentence_transformers", "sbert_ce_default_activation_function")
_VECTORS = {"SentenceTransformer": "sentence vectors", "SparseEncoder": "sparse vectors", "CrossEncoder": "scores"}


def compare_models(teacher: Teacher, student: PreTrainedModel) -> Differences:
    """Return the largest difference of the outputs of a model and its teacher, for one text and a padded batch.

    Raises:
        ConversionError: Rounding does not explain the difference.
    """
    ours, theirs = (model.get_input_embeddings().weight for model in (student, teacher.model))
    if not torch.equal(ours, theirs.to(ours.device)):
        raise _error("the word embeddings of the copy are not those of the teacher")
    length = _longest(teacher, student)
    padded = min(length, _PADDED)
    batches = {f"length {length}": [length], "a padded batch": [padded, (padded + 1) // 2, 1]}
    inputs = {name: make_inputs(student, lengths) for name, lengths in batches.items()}
    return {"outputs": _compare_outputs(teacher, student, inputs)}


def compare_folder(
    teacher: Teacher,
    name: str,
    student: PreTrainedModel,
    folder: Path,
    modules: SentenceModules | None = None,
    new_head: bool = False,
) -> Differences:
    """Return the largest differences of a saved model and its teacher, by kind of output.

    Outputs are compared in the dtype of the folder for every kind of input, and in float64, where a fault cannot be
    mistaken for rounding, for a text with all positions of the teacher. Vectors and scores of both folders are computed
    by sentence-transformers; if it is not installed, their difference is None.

    `name` is the folder or name of the teacher, whose model is converted to float64; `new_head` specifies whether it
    has another head than the student, or none. `modules` are those of the teacher that were copied.

    Raises:
        ConversionError: Weights, tokenizers or modules differ, or rounding does not explain the difference of outputs.
    """
    logger.info("comparing the folder with the teacher")
    saved, length = read_folder(folder), _longest(teacher, student)
    loaded, weights = saved.load(dtype="auto").to(student.device), student.state_dict()
    for key, tensor in loaded.state_dict().items():
        if not torch.equal(tensor, weights[key]):
            raise _error(f"the folder has another tensor {key} than the converted model")
    tokenizer = load_tokenizer(folder)
    if tokenizer.pad_token_id not in (None, loaded.config.pad_token_id):
        raise _error(
            f"the tokenizer pads with {tokenizer.pad_token_id}, but the model with {loaded.config.pad_token_id}"
        )
    batches = sample_inputs(loaded, tokenizer, longest=min(length, _PADDED))
    longer = sample_inputs(loaded, tokenizer, longest=length)
    batches |= {name: batch for name, batch in longer.items() if name.startswith("length")}
    differences: Differences = {"outputs": _compare_outputs(teacher, loaded, batches)}
    # With a row of P for every position, all texts that the teacher reads are exact.
    table = min(teacher.max_length, student.config.max_position_embeddings)
    logger.info("comparing a text of %d tokens in float64", table)
    exact = saved.load(dtype="auto", projection_length=table).to(student.device, torch.float64)
    teacher.model.double()
    _compare_outputs(teacher, exact, {f"{table} tokens in float64": make_inputs(exact, [table], processor=tokenizer)})

    longest = min(length, modules.max_seq_length or length) if modules else length
    words = batches[f"length {length}"]["input_ids"].flatten().tolist()
    singles, pairs = _texts(tokenizer, words, longest)
    _compare_tokenizers(load_tokenizer(name), tokenizer, singles, pairs)
    if modules:
        _compare_modules(modules, folder)
    kind = None if new_head else class_of_scores(student, modules)
    texts = pairs if kind == "CrossEncoder" else singles
    if kind and texts:
        differences[_VECTORS[kind]] = _compare_vectors(kind, name, folder, texts, longest)
    return differences


def class_of_scores(model: PreTrainedModel, modules: SentenceModules | None) -> str | None:
    """Return the class of sentence-transformers that computes vectors or scores from a folder, or None."""
    if modules:
        return modules.kind
    scores = find_head(model) == "ForSequenceClassification" and any(hasattr(model.config, field) for field in SCORES)
    return "CrossEncoder" if scores else None


def _error(what: str) -> ConversionError:
    return ConversionError(f"{what}; the conversion of this teacher is faulty, report it with the name of the teacher")


def _longest(teacher: Teacher, student: PreTrainedModel) -> int:
    return min(student.config.projection_length, student.config.max_position_embeddings, teacher.max_length)


@torch.no_grad()
def _compare_outputs(teacher: Teacher, student: PreTrainedModel, batches: dict[str, dict[str, torch.Tensor]]) -> float:
    """Return the largest difference of the outputs at unmasked positions."""
    head, largest = find_head(teacher.model), 0.0
    pooled = head in ("ForSequenceClassification", "ForMultipleChoice")
    for name, batch in batches.items():
        if pooled and name == "padded left":  # the teacher's classifiers read the first position, even if it is padding
            continue
        inputs = {key: tensor.to(student.device) for key, tensor in batch.items()}
        mask = inputs["attention_mask"].bool()
        with _uncompiled(teacher.model):
            found = student(**inputs), teacher.model(**teacher.inputs(inputs))
        count = 2 if head == "ForQuestionAnswering" else 1
        ours, theirs = (x.to_tuple()[:count] + tuple(getattr(x, "hidden_states", None) or ()) for x in found)
        for place, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            y = y.to(x.device)
            x, y = (x, y) if pooled and place == 0 else (x[mask], y[mask])
            largest = max(largest, _difference(x, y, f"outputs for {name}", student.dtype))
    return largest


def _difference(ours: torch.Tensor, theirs: torch.Tensor, what: str, dtype: torch.dtype) -> float:
    difference = (ours - theirs).abs().max().item()
    fast = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"  # products in TF32 or bfloat16
    limit = _TOLERANCES[torch.bfloat16 if fast else dtype] * max(1.0, theirs.abs().max().item())
    if not difference <= limit:  # also if it is NaN
        rounding = f"rounding in {str(dtype).removeprefix('torch.')} explains at most {limit:.1e}"
        raise _error(f"the {what} of the copy differ from the teacher's by {difference:.1e}, but {rounding}")
    return difference


def _uncompiled(model: torch.nn.Module) -> AbstractContextManager:
    """Disable the compilation of `model.compile()`, so that a comparison does not compile for its shapes."""
    compiled = any(getattr(module, "_compiled_call_impl", None) for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _texts(tokenizer: PreTrainedTokenizerBase, ids: list[int], longest: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return texts and pairs of texts of at most `longest` tokens, made of the words of `ids`."""
    counts = sorted({1, 2, longest // 4, longest // 2, longest - 2} - {0})
    texts = [tokenizer.decode(ids[:count], skip_special_tokens=True) for count in counts if count > 0]
    pairs = [(first, second) for first in texts for second in texts[:2]]
    return (
        [text for text in texts if len(tokenizer(text, verbose=False)["input_ids"]) <= longest],
        [pair for pair in pairs if len(tokenizer(*pair, verbose=False)["input_ids"]) <= longest],
    )


def _compare_tokenizers(
    theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, texts: list[str], pairs: list[tuple[str, str]]
) -> None:
    padding = theirs.pad_token_id is not None and ours.pad_token_id is not None
    for inputs in (texts, pairs):
        got, expected = (dict(tokenizer(inputs, padding=padding)) if inputs else {} for tokenizer in (ours, theirs))
        if wrong := [name for name in expected | got if got.get(name) != expected.get(name)]:
            raise _error(f"the tokenizer in the folder returns other {wrong[0]} than the teacher's")


def _compare_modules(modules: SentenceModules, folder: Path) -> None:
    """Compare the modules in a folder with those that were copied; only the maximum length may differ."""
    saved = read_modules(str(folder))
    if saved is None or (saved.kind, saved.files.keys()) != (modules.kind, modules.files.keys()):
        raise _error("the folder has other modules of sentence-transformers than the teacher")
    for path, file in modules.files.items():
        if saved.files[path].read_bytes() != file.read_bytes():
            raise _error(f"{shown(path)} in the folder is not the teacher's")


def _compare_vectors(kind: str, name: str, folder: Path, texts: list[Any], longest: int) -> float | None:
    """Return the largest difference of vectors or scores, or None if sentence-transformers is not installed."""
    try:
        logger.info("comparing the %s of sentence-transformers", _VECTORS[kind])
        import sentence_transformers
    except ImportError:
        return None
    found = []
    for path in (str(folder), name):
        try:
            model = getattr(sentence_transformers, kind)(path, device="cpu", model_kwargs={"dtype": torch.float32})
            model.max_seq_length = longest  # a default prompt may exceed the teacher's limit
            read = model.predict if kind == "CrossEncoder" else model.encode
            vectors = read(texts, show_progress_bar=False, convert_to_tensor=True)
        except Exception as error:  # damaged files of modules cause exceptions of many types
            where = "the copy" if path == str(folder) else name
            raise ConversionError(f"{where}: sentence-transformers: {type(error).__name__}: {reason(error)}") from error
        found.append(vectors.to_dense() if vectors.is_sparse else vectors)
    return _difference(*found, _VECTORS[kind], torch.float32)
