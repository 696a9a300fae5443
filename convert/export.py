"""Writes a model folder back as a checkpoint of the original fairseq code: `luna-mega export`."""

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from luna_mega import LunaConfig, MegaConfig
from luna_mega.convert import fairseq_args, keymap_luna, keymap_mega
from luna_mega.convert.dictionary import SPECIALS, assign_dictionaries, assign_pair
from luna_mega.convert.evidence import same_bits
from luna_mega.convert.fairseq_to_hf import DTYPES
from luna_mega.convert.layer_norm import CONVENTIONS
from luna_mega.convert.mapping import Mapping, few, map_tensors
from luna_mega.convert.plan import Plan
from luna_mega.convert.plans import make_plan
from luna_mega.convert.source_detect import Source
from luna_mega.convert.source_norms import source_norms
from luna_mega.errors import ConversionError
from luna_mega.hub.folder import ModelFolder, read_folder
from luna_mega.modeling_luna.heads_luna import LunaLMHead
from luna_mega.modeling_luna.modeling_luna import sinusoids

# Output layer -> the embedding that it may be tied to, and that then is all that the folder has.
_TIED = {
    "luna": ("lm_head.decoder.weight", "luna.embeddings.word_embeddings.weight"),
    "mega": ("lm_head.weight", "mega.embedding_layer.word_embeddings.weight"),
}
_CRITERIA = {
    "masked_lm": "MaskedLmLoss",
    "sentence_prediction": "SentencePredictionCriterion",
    "sentence_ranking": "SentenceRankingCriterion",
    "lra_cross_entropy": "LRACrossEntropyCriterion",
    "adaptive_loss": "AdaptiveLoss",
    "label_smoothed_cross_entropy": "LabelSmoothedCrossEntropyCriterion",
}
# Buffers that hold the number of a layout.
_VERSIONS = {
    "encoder.version": torch.tensor([3.0]),
    "decoder.version": torch.tensor([3.0]),
    "decoder.adaptive_softmax.version": torch.tensor([1]),
}
# What a model says nothing about.
_KEPT_ARGS = ("arch", "task", "source_lang", "target_lang", "left_pad_source", "left_pad_target")
# Where a task of the original looks for its dictionaries, beside the file.
_VOCABULARY_OF_TASK = {
    "sentence_prediction": "input0/dict.txt",
    "sentence_ranking": "input0/dict.txt",
    "long_range_arena": "src-bin/dict.txt",
    "lra-text": "src-bin/dict.txt",
}
_LABELS_OF_TASK = {"sentence_prediction": "label/dict.txt"}


@dataclass
class ExportReport:
    """What an export read and wrote."""

    folder: str
    output: str
    model_class: str
    layout: str
    args: dict[str, Any]
    head: str | None
    layer_norm: str | None
    tensors: int
    dtype: str
    files: list[str]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            ("read", f"{self.folder}: {self.model_class}"),
            ("layout", f"{self.layout}, arch {self.args.get('arch')}, task {self.args.get('task')}"),
            ("head", self.head or "none with a name"),
            *([("layer norm", self.layer_norm)] if self.layer_norm else []),
            ("tensors", f"{self.tensors}, {self.dtype}"),
            *(("note", note) for note in self.notes),
            *(("warning", warning) for warning in self.warnings),
            ("written", f"{self.output}: {', '.join(self.files)}"),
        ]
        return "\n".join(f"{name:<12}{value}" for name, value in lines)


@dataclass(frozen=True)
class _Target:
    """The layout to write, the classification head's name in it, and what is known of the file that was converted."""

    layout: tuple[str, str]
    head: str | None
    layer_norm: str | None
    recorded_args: dict[str, Any] | None
    recorded_head: str | None

    @property
    def is_mega(self) -> bool:
        return self.layout[0].startswith("mega_")


def export_checkpoint(
    folder: str | Path,
    output: str | Path,
    *,
    head: str | None = None,
    layer_norm: str | None = None,
    dtype: str | None = None,
    dictionaries: Sequence[str | Path] = (),
    progress: bool = False,
) -> ExportReport:
    """Writes a checkpoint that fairseq's loader and `convert_checkpoint` read, and its dictionaries beside it.

    Args:
        folder: what `luna-mega convert` or `save_pretrained` wrote.
        output: file to write, which must not exist; after a failure it does not.
        head: name of a luna_bert classification head, which there is its kind. None = as in the converted file, else
            the usual one.
        layer_norm: of Luna, "standard" or "plus-one" (the 2023 code stores weight - 1); None = as in the converted
            file, else as in the code that has the model.
        dtype: "float32", "float16" or "bfloat16"; None = that of the converted file if nothing is lost by it, else
            that of the folder.
        dictionaries: vocabulary and label dictionary in any order; when none is given, those of the folder.
        progress: show a progress bar on stderr if that is a terminal.

    Returns the report that the command prints.

    Raises:
        ConversionError: the folder is at fault, or the original cannot express the model; one line says how.
        ValueError: an option has no such value.
    """
    output = _check_options(output, layer_norm, dtype)
    source = read_folder(folder)
    try:
        target = _choose_target(source, head)
        if layer_norm is not None and target.layer_norm is None:
            raise ConversionError(f"--layer-norm {layer_norm}: Mega stores norm weights as they are; leave it out")
        tensors, notes = _rename(source, target)
        plan, mapping, args, warnings = _plan_args(source, target, tensors)
    except ConversionError as error:
        raise ConversionError(f"{source.path}: {error}") from error
    if target.head is not None and args.get("task") == "masked_lm":
        notes.append(f"the task in args is masked_lm: luna-mega convert takes the head with --head {target.head}")
    convention = layer_norm or target.layer_norm
    tensors, stored_as = _store(source, tensors, mapping, convention == "plus-one", dtype)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=_existing_parent(output)) as temporary:
        missing = _write_dictionaries(Path(temporary), output.parent, source, plan, args.get("task"), dictionaries)
        _write(Path(temporary, output.name), _state(source, args, tensors), progress)
        files = _publish(Path(temporary), output)
    return ExportReport(
        folder=str(source.path),
        output=str(output.parent),
        model_class=source.model_class.__name__,
        layout=fairseq_args.LAYOUT_NAMES[target.layout],
        args=args,
        head=target.head,
        layer_norm=convention,
        tensors=len(tensors),
        dtype=_name(next(iter(tensors.values())).dtype),
        files=files,
        notes=[*notes, *stored_as, *missing],
        warnings=warnings,
    )


def _check_options(output: str | Path, layer_norm: str | None, dtype: str | None) -> Path:
    for name, value, choices in (("layer_norm", layer_norm, CONVENTIONS), ("dtype", dtype, DTYPES)):
        if value not in (None, *choices):
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    output = Path(output).resolve()
    if output.exists():
        raise ConversionError(f"{output}: exists already; give a new file name or remove it")
    return output


def _choose_target(source: ModelFolder, head: str | None) -> _Target:
    report = source.report or {}
    given = (report["source"]["layout"], report["source"]["revision"]) if report else None
    classifier = fairseq_args.has_classifier(source.model_class)
    recorded = report["decisions"].get("head") if report and classifier else None
    layout = fairseq_args.choose_layout(source.config, source.model_class, head or recorded, given)
    named = classifier and layout[0] == "luna_bert"
    if head is not None and not named:
        raise ConversionError(f"--head {head}: the original has no named head for a {source.model_class.__name__}")
    if head is not None and not re.fullmatch(r"[\w-]+", head):
        raise ConversionError(f"--head {head!r}: a name has letters, digits, '_' and '-' only")
    convention = "plus-one" if layout == fairseq_args.LRA_2023 else "standard"
    if layout[0].startswith("mega_"):
        convention = None
    elif report:
        convention = report["decisions"]["layer_norm"]
    return _Target(
        layout,
        (head or recorded or fairseq_args.HEAD_OF_POOLING[source.config.pooling]) if named else None,
        convention,
        report.get("args"),
        recorded,
    )


def _rename(source: ModelFolder, target: _Target) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors under fairseq's names, with those that a folder does not have, and notes about them."""
    config, ours, notes = source.config, source.tensors(), []
    if target.layout[0] == "mega_lra":
        keymap = keymap_mega.mega_lra(target.layout[1], config.input_type, config.classifier_num_layers)
    elif target.layout[0] == "mega_lm":
        keymap = keymap_mega.mega_lm(target.layout[1], config)
    elif target.layout[0] == "mega_seq2seq":
        keymap = keymap_mega.mega_seq2seq(target.layout[1], config)
        ours = _with_copies(ours, config.shares_embeddings, config.tie_word_embeddings)
    elif target.layout[0] == "luna_seq2seq":
        keymap = keymap_luna.luna_seq2seq()
        ours = _with_copies(ours, config.shares_embeddings, config.tie_word_embeddings)
    elif target.layout[0] == "luna_lra":
        keymap = keymap_luna.luna_lra(target.layout[1], config.input_type)
    else:
        keymap = keymap_luna.luna_bert(target.head)
        if not any(name.startswith("lm_head.") for name in ours):
            ours |= _fresh_lm_head(config, next(iter(ours.values())).dtype)
            notes.append("the folder has no LM head, which fairseq's loader asks for: a new, untrained one is written")
    output, embedding = _TIED[config.model_type]
    if target.layout[0] in ("luna_bert", "mega_lm") and config.tie_word_embeddings and embedding in ours:
        ours[output] = ours[embedding]
    matches = {name: keymap.backward(name) for name in ours}
    if unknown := [name for name, match in matches.items() if match is None]:
        raise ConversionError(f"{fairseq_args.LAYOUT_NAMES[target.layout]} has no place for {few(unknown)}")
    tensors = {matches[name].key: tensor for name, tensor in ours.items()}
    dtype = next(iter(ours.values())).dtype
    if target.layout == fairseq_args.LRA_2023:
        tensors |= _sinusoids_of(config, "encoder.encoder", dtype)
    if target.layout[0] == "luna_seq2seq":
        tensors |= _sinusoids_of(config, "encoder", dtype) | _sinusoids_of(config.decoder_config, "decoder", dtype)
        tensors |= {f"{side}.version": _VERSIONS[f"{side}.version"] for side in ("encoder", "decoder")}
    if target.is_mega:
        tensors |= _mega_extras(config, target.layout[0], tensors)
        # By the order fairseq's branches are told apart.
        tensors = {key: tensors[key] for key in sorted(tensors, key=keymap.position)}
    dropped = [row["source"] for row in (source.report or {}).get("dropped", [])]
    if heads := sorted({name.split(".")[1] for name in dropped if name.startswith("classification_heads.")}):
        notes.append(f"the conversion left out the heads {', '.join(heads)}: they are not in the file")
    return tensors, notes


def _sinusoids_of(config: LunaConfig, body: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The buffers that the original saves where positions are sinusoidal."""
    if config.position_embedding_type != "sinusoidal":
        return {}
    buffers = {f"{body}.embed_positions._float_tensor": torch.zeros(1, dtype=dtype)}
    if not config.add_cross_attention:
        table = sinusoids(torch.arange(config.projection_length), config.hidden_size)
        buffers[f"{body}.projected_positions"] = table.to(dtype)
    return buffers


def _with_copies(ours: dict[str, torch.Tensor], joint: bool, tied: bool) -> dict[str, torch.Tensor]:
    """The tensors of an encoder-decoder with those that are copies: the target's words, and the output layer."""
    source = next(name for name in ours if ".encoder." in name and name.endswith(".word_embeddings.weight"))
    target = source.replace(".encoder.", ".decoder.", 1)
    if joint:
        ours = ours | {target: ours[source]}
    return ours | {"lm_head.weight": ours[target]} if tied and target in ours else ours


def _mega_extras(config: MegaConfig, layout: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the original saves besides: numbers of its layout, buffers without content, copies of tied tensors."""
    if layout == "mega_lra":
        return {name: torch.zeros(1) for name in keymap_mega.bias_placeholders(keymap_mega.BODY, config)}
    placeholders = keymap_mega.seq2seq_placeholders if config.is_encoder_decoder else keymap_mega.placeholders
    extras = {name: torch.zeros(1) for name in placeholders(config)}
    extras |= {name: number for name, number in _VERSIONS.items() if name in extras}
    if config.is_encoder_decoder:
        return extras
    return extras | {copy: tensors[name] for copy, name in keymap_mega.tied_copies(config).items() if name in tensors}


def _fresh_lm_head(config: LunaConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same file every time
        head = LunaLMHead(config)
        for linear in (head.dense, head.decoder):
            nn.init.normal_(linear.weight, std=config.initializer_range)
            nn.init.zeros_(linear.bias)
    return {f"lm_head.{name}": tensor.to(dtype) for name, tensor in head.state_dict().items()}


def _plan_args(
    source: ModelFolder, target: _Target, tensors: dict[str, torch.Tensor]
) -> tuple[Plan, Mapping, dict[str, Any], list[str]]:
    """The args, and how the converter understands the file with them: it must be the model of the folder."""
    if target.recorded_args is not None and target.head == target.recorded_head:
        try:
            plan, mapping = _read_back(target, tensors, target.recorded_args)
        except ConversionError:
            plan = None  # config.json was edited; the args are made from it below
        if plan is not None and not _differences(source, plan):
            return plan, mapping, target.recorded_args, []
    recorded = target.recorded_args or {}
    args = recorded | fairseq_args.make_args(source.config, source.model_class, target.layout, target.head)
    if target.is_mega:
        args |= {name: recorded[name] for name in _KEPT_ARGS if name in recorded}
    plan, mapping = _read_back(target, tensors, args)
    warnings = []
    for name, ours, theirs in _differences(source, plan):
        if name not in fairseq_args.TRAINING_FIELDS:
            raise ConversionError(
                f"config.json: {name} = {ours!r}, but the original reads {theirs!r} from these weights"
            )
        warnings.append(f"{name} = {ours!r} is not in the original, which trains with {theirs!r}; scores are the same")
    if changed := sorted(name for name in recorded if recorded[name] != args[name]):
        warnings.append(f"args of the converted file that no longer hold are replaced: {', '.join(changed)}")
    return plan, mapping, args, warnings


def _read_back(target: _Target, tensors: dict[str, torch.Tensor], args: dict[str, Any]) -> tuple[Plan, Mapping]:
    plan = make_plan(Source(*target.layout, args.get("arch")), tensors, args, target.head)
    return plan, map_tensors(plan, tensors)


def _differences(source: ModelFolder, plan: Plan) -> list[tuple[str, Any, Any]]:
    found = fairseq_args.differences(source.config, plan.config, source.model_class)
    if plan.model_class is not source.model_class and fairseq_args.has_classifier(source.model_class):
        found.append(("architectures", source.model_class.__name__, plan.model_class.__name__))
    return found


def _store(
    source: ModelFolder, tensors: dict[str, torch.Tensor], mapping: Mapping, plus_one: bool, dtype: str | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors in the dtype of the file, with `plus_one` the norm weights minus one, and notes on what changes."""
    notes, ours = [], {key: tensors[key] for key in mapping.norm_weights} if plus_one else {}
    lowered = {key: weight.float() - 1 for key, weight in ours.items()} | source_norms(source.path, ours)
    in_file = (source.report or {}).get("dtype_in", {})
    originals = {name for name in in_file if getattr(torch, name).is_floating_point}
    if dtype is None:
        stored = {_name(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
        fitting = [names.pop() for names in (set(originals), stored) if len(names) == 1 and names <= set(DTYPES)]
        read_back = {key: tensors[key] for key in mapping.mapped if tensors[key].is_floating_point()}
        dtype = next((name for name in fitting if _keeps_all(read_back, lowered, name)), "float32")
        if originals and originals != {dtype}:
            notes.append(f"the converted file was {', '.join(sorted(originals))}; {dtype} keeps what the folder has")
    if rounded := sum((weight.float() + 1 != ours[key].float()).sum().item() for key, weight in lowered.items()):
        notes.append(f"{rounded} norm weights below 0.5 are rounded by up to 6e-8: minus one they need more bits")
    cast: dict[int, torch.Tensor] = {}
    for key, tensor in tensors.items():
        value = lowered.get(key, tensor)
        target = getattr(torch, dtype) if value.is_floating_point() else value.dtype
        cast.setdefault(id(tensor), value.to(target))  # a tied tensor is written once
    return {key: cast[id(tensor)] for key, tensor in tensors.items()}, notes


def _keeps_all(tensors: dict[str, torch.Tensor], lowered: dict[str, torch.Tensor], dtype: str) -> bool:
    """Whether converting the file again gives the same tensors."""
    target = getattr(torch, dtype)
    return all(
        same_bits((lowered[key].to(target).float() + 1).to(tensor.dtype), (lowered[key].float() + 1).to(tensor.dtype))
        if key in lowered
        else tensor.dtype == target or same_bits(tensor.to(target).to(tensor.dtype), tensor)
        for key, tensor in tensors.items()
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _state(source: ModelFolder, args: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What fairseq's `checkpoint_utils.save_state` saves, at the start of an epoch and without an optimizer state."""
    history = {
        "criterion_name": _CRITERIA.get(args.get("criterion"), "CrossEntropyCriterion"),
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"best": None},
        "num_updates": (source.report or {"source": {}})["source"].get("num_updates") or 0,
    }
    return {
        "args": argparse.Namespace(**args),
        "model": tensors,
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}, "val_loss": None},
    }


def _write_dictionaries(
    folder: Path, beside: Path, source: ModelFolder, plan: Plan, task: str | None, given: Sequence[str | Path]
) -> list[str]:
    """Writes the dictionaries into `folder` where the task looks for them, but those that are in `beside` already."""
    task_files = _dictionaries if plan.languages is None else _dictionary_pair
    files, notes = task_files(source, plan, task, list(given))
    for name, content in files.items():
        if (beside / name).exists():
            if (beside / name).read_bytes() != content:
                raise ConversionError(f"{beside / name}: another file is there; remove it or give another --output")
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return notes


def _dictionaries(source: ModelFolder, plan: Plan, task: str | None, given: list) -> tuple[dict[str, bytes], list[str]]:
    own = [path for name in ("dict.txt", "dict.label.txt") if (path := source.path / name).is_file()]
    vocab_size = plan.vocab_size
    found = assign_dictionaries(given or own, source.path, vocab_size, plan.appended_symbol, plan.num_labels)
    labels = _LABELS_OF_TASK.get(task, "label-bin/dict.txt")
    files, notes = {}, list(found.warnings)
    if found.vocabulary is not None:
        for name in {"dict.txt", _VOCABULARY_OF_TASK.get(task, "dict.txt")}:
            files[name] = found.vocabulary.path.read_bytes()
    elif vocab_size is not None:
        notes.append("no dict.txt in the folder, which fairseq needs beside the file; --dict adds it")
    if found.labels is not None:
        files[labels] = found.labels.path.read_bytes()
    elif vocab_size is not None and plan.num_labels and plan.config.problem_type != "regression":
        files[labels] = _label_dictionary([source.config.id2label[index] for index in range(plan.num_labels)])
    return files, notes


def _dictionary_pair(
    source: ModelFolder, plan: Plan, task: str | None, given: list
) -> tuple[dict[str, bytes], list[str]]:
    """Those of source and target, which fairseq looks for by the languages."""
    own = [path for name in ("dict.txt", "dict.target.txt") if (path := source.path / name).is_file()]
    sizes, joint = (plan.vocab_size, plan.target_vocab_size), plan.config.share_encoder_decoder_embeddings
    found = assign_pair(given or own, source.path, plan.languages, sizes, joint)
    if found.vocabulary is None:
        return {}, ["no dict.txt in the folder, but fairseq needs both languages' beside the file; --dict adds them"]
    dictionaries = zip(plan.languages, (found.vocabulary, found.target), strict=True)
    return {f"dict.{language}.txt": dictionary.path.read_bytes() for language, dictionary in dictionaries}, []


def _label_dictionary(names: list[str]) -> bytes:
    for name in names:
        if not re.fullmatch(r"\S+( \S+)*", name) or name in SPECIALS or names.count(name) > 1:
            raise ConversionError(f"config.json: id2label has {name!r}, which no dictionary can hold; rename the class")
    return "".join(f"{name} 1\n" for name in names).encode()


def _write(path: Path, state: dict[str, Any], progress: bool) -> None:
    size = sum({id(tensor): tensor.nbytes for tensor in state["model"].values()}.values())
    bar = {"desc": path.name, "total": size, "disable": None if progress else True, "delay": 1}
    try:
        with path.open("wb") as file, tqdm.wrapattr(file, "write", **bar) as writer:
            torch.save(state, writer)
    except RuntimeError as error:  # what torch makes of a full disk
        raise ConversionError(f"cannot write {path.name}: {error}") from error


def _existing_parent(output: Path) -> Path:
    return next(folder for folder in output.parents if folder.is_dir())


def _publish(folder: Path, output: Path) -> list[str]:
    """Moves the files from `folder` to beside `output`, the checkpoint itself last."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != output.name]
    names = [str(path.relative_to(folder)) for path in (*files, folder / output.name)]
    done = []
    try:
        for name in names:
            target = output.parent / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(target)
            done.append(target)
    except BaseException:  # an interrupt leaves nothing behind either
        for path in done:
            path.unlink()
        raise
    return names
