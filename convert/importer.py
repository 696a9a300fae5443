"""Convert a checkpoint of the original code to a folder that transformers loads (`luna-mega convert`)."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.cards import architecture, conversion_card, how_to_load, license_metadata
from luna_mega.convert import conventions
from luna_mega.convert.dictionaries import Dictionaries
from luna_mega.convert.evidence import Evidence, ModelSpec, Tensors
from luna_mega.convert.formats import Format, Notes, registered_formats
from luna_mega.convert.formats.format import read_model
from luna_mega.convert.formats.registry import detect, open_checkpoint
from luna_mega.convert.report import REPORT_NAME, Report, without_folders
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.tensors import (
    DTYPES,
    TensorMap,
    check_unshared,
    convert_tensors,
    dtype_name,
    map_tensors,
    meta_model,
    non_finite,
    weights_of,
)
from luna_mega.convert.tokenizers import ConvertedTokenizer
from luna_mega.errors import ConversionError, errors_of
from luna_mega.escaping import short_line
from luna_mega.hub.output import check_output, complete_folder


@dataclass(frozen=True)
class _Source:
    """A checkpoint, its format, the model that it contains, and the mapping of its tensors."""

    checkpoint: Checkpoint
    format: Format
    spec: ModelSpec
    evidence: Evidence
    mapping: TensorMap
    norm: conventions.Decision | None
    notes: list[str]
    warnings: list[str]

    @property
    def minus_one(self) -> bool:
        """Return whether norm weights are stored minus one."""
        return self.norm is not None and self.norm.convention == conventions.MINUS_ONE


def convert_checkpoint(
    path: str | Path,
    output: str | Path | None,
    *,
    dictionaries: Sequence[str | Path] = (),
    bpe: str | Path | None = None,
    head: str | None = None,
    layer_norm: str = "auto",
    ema_convention: str = "auto",
    dtype: str | None = None,
    license: str | None = None,
    progress: bool = False,
) -> Report:
    """Convert a checkpoint of a registered format without executing code in it.

    Args:
        path: Checkpoint of the original code, a file or a folder.
        output: Folder to write, absent or empty. It is not changed if the conversion fails. None = write nothing.
        dictionaries: Vocabulary and label dictionary, or dictionaries of source and target, in any order. Default: the
            files in the folder of the checkpoint.
        bpe: Folder with GPT-2's BPE files if the symbols of the dictionary are GPT-2 ids, codes of a byte-pair encoding
            for translation, or a SentencePiece model. Other tokenizers need only the dictionary.
        head: Name of the classification head to convert, if heads have names. Default: the only one of a fine-tuned
            model, or the language model.
        layer_norm: "auto", "standard" or "plus-one" (the original stores weight - 1).
        ema_convention: Branch of the code that wrote a moving average; "auto" uses the order of the tensors.
        dtype: "float32", "float16" or "bfloat16". Default: float32; for Megalodon, the dtype of the checkpoint.
        license: Identifier of the license of the weights on the Hub, or "other:NAME", for the model card.
        progress: Show a progress bar if stderr is a terminal.

    Returns:
        The report. Most of it is also written to conversion_report.json.

    Raises:
        ConversionError: If the input is invalid. The message is one line with the file or field, and how to fix it.
        ValueError: If an option has an invalid value.
    """
    conventions.check_choice("layer_norm", layer_norm, ("auto", *conventions.NORMS))
    conventions.check_choice("ema_convention", ema_convention, ("auto", *conventions.ORDER))
    conventions.check_choice("dtype", dtype, (None, *DTYPES))
    license_metadata(license)
    output = None if output is None else check_output(output)
    source = _identify(open_checkpoint(path, progress), head, layer_norm, ema_convention)
    config, tensors = source.spec.config, source.checkpoint.tensors
    companions = source.format.companions(source.spec, source.evidence)
    words = source.format.report(source.spec, source.evidence)
    chosen = companions.dictionaries.find(list(dictionaries), source.checkpoint.folder)
    if chosen.class_names:
        config.id2label = dict(enumerate(chosen.class_names))
        config.label2id = {label: index for index, label in config.id2label.items()}
    tokenizer = companions.tokenizer(chosen, bpe, words.notes)
    dtype = dtype or source.format.facts.container.stored_dtype(tensors)
    converted = convert_tensors(source.mapping, tensors, source.minus_one, getattr(torch, dtype))
    model = meta_model(source.spec.model_class, config).to(getattr(torch, dtype))
    if companions.generation:
        model.generation_config.update(**companions.generation)
    report = _report(output, source, words, chosen, tokenizer, converted, model)
    if output is None:
        return report
    card = conversion_card(
        output.name,
        report.model_class,
        config,
        report.source,
        str(report),
        parameters=report.parameters["model"],
        tokenizer=tokenizer is not None,
        license=license,
    )
    with complete_folder(output) as folder:
        model.save_pretrained(folder, state_dict=converted, max_shard_size="50GB")
        if companions.preprocessor is not None:
            content = json.dumps(companions.preprocessor, indent=2) + "\n"
            (folder / "preprocessor_config.json").write_text(content, encoding="utf-8")
        for name, file in chosen.files.items():
            shutil.copyfile(file, folder / name)
        if tokenizer is not None:
            tokenizer.save(folder)
        card.save(folder / "README.md")
        report.files = [*sorted(file.name for file in folder.iterdir()), REPORT_NAME]
        report.save(folder)
    report.load = how_to_load(source.spec.model_class, str(output))
    return report


def _identify(checkpoint: Checkpoint, head: str | None, layer_norm: str, ema_convention: str) -> _Source:
    fmt, revision, checkpoint, notes = detect(checkpoint)
    facts, tensors = fmt.facts, checkpoint.tensors
    with errors_of(checkpoint.path):
        if head is not None and not facts.named_heads:
            named = ", ".join(known.facts.name for known in registered_formats() if known.facts.named_heads)
            raise ConversionError(f"--head {head}: only {named} files have named heads; omit the option")
        for name, value in (("layer-norm", layer_norm), ("ema-convention", ema_convention)):
            if value != "auto" and name in facts.unsupported_options:
                raise ConversionError(f"--{name} {value}: {facts.unsupported_options[name]}; omit the option")
        branch = None
        if "ema-convention" not in facts.unsupported_options:
            branch = conventions.decide_ema_convention(tensors, ema_convention)
            revision = branch.convention
        spec, evidence = read_model(fmt, tensors, checkpoint.args, revision, head)
        weights = weights_of(spec.config, spec.model_class, *facts.additional_classes)
        mapping = map_tensors(fmt.keymap(spec), weights, tensors)
        if checkpoint.unchecked:
            check_unshared(mapping, tensors)
        norms = [tensors[key] for key in mapping.norm_weights]
        norm = conventions.decide_layer_norm(norms, layer_norm) if norms else None
    warnings = [*evidence.warnings, *(made.warning for made in (branch, norm) if made and made.warning)]
    return _Source(checkpoint, fmt, spec, evidence, mapping, norm, notes, warnings)


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the sizes in the configuration of a model; those of a decoder are added if they differ."""
    sizes = architecture(config)
    if config.is_encoder_decoder:
        own = architecture(config.decoder_config).items()
        sizes |= {f"decoder_{name}": value for name, value in own if value != sizes[name]}
    return sizes


def _report(
    output: Path | None,
    source: _Source,
    words: Notes,
    dictionaries: Dictionaries,
    tokenizer: ConvertedTokenizer | None,
    converted: Tensors,
    model: PreTrainedModel,
) -> Report:
    checkpoint, spec, norm, facts = source.checkpoint, source.spec, source.norm, source.format.facts
    task = checkpoint.args.get("task")
    infinite = [target for target, tensor in converted.items() if not tensor.isfinite().all()]
    warnings = [*checkpoint.warnings, *source.warnings, *dictionaries.warnings]
    if infinite:
        warnings.append(non_finite(infinite, converted))
        if facts.finite:
            raise ConversionError(f"{checkpoint.path}: {warnings[-1]}; copy it again, or pass an earlier checkpoint")
    statistics = {name for name, _ in model.named_buffers()}
    shape = {key: list(tensor.shape) for key, tensor in checkpoint.tensors.items()}
    mapped, dropped = source.mapping.mapped.items(), source.mapping.dropped.items()
    return Report(
        output=output and str(output),
        source={
            "file": os.fsencode(checkpoint.path.absolute().name).decode("utf-8", "backslashreplace"),
            "sha256": checkpoint.sha256,
            "serialization": checkpoint.serialization,
            "software": facts.container.software,
            "layout": facts.name,
            "revision": spec.revision,
            "arch": short_line(without_folders(facts.container.architecture(checkpoint.args))),
            "task": task if task is None else short_line(without_folders(str(task))),
            "num_updates": checkpoint.num_updates,
        },
        model_class=spec.model_class.__name__,
        decisions=({"layer_norm": norm.convention, "layer_norm_mean": norm.mean} if norm else {})
        | words.decisions
        | {name: getattr(spec.config, name) for name in facts.decided},
        mapped=[{"source": key, "target": target, "shape": shape[key]} for key, target in mapped],
        dropped=[{"source": key, "shape": shape[key], "reason": reason} for key, reason in dropped],
        dtype_in=dict(Counter(dtype_name(tensor.dtype) for tensor in checkpoint.tensors.values())),
        dtype_out=dtype_name(model.dtype),
        parameters={
            "model": model.num_parameters(),
            "file": sum(tensor.numel() for name, tensor in converted.items() if name not in statistics),
        },
        non_finite=infinite,
        tokenizer=tokenizer and tokenizer.summary,
        args=dict(checkpoint.args),
        notes=[*words.notes, *dictionaries.notes, *source.notes],
        warnings=warnings,
        code=facts.revisions[spec.revision],
        sizes=_sizes(spec.config),
        labels=list(spec.config.id2label.values()) if "Classification" in spec.model_class.__name__ else [],
    )
