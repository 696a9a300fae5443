"""Converts a fairseq checkpoint of a Luna or Mega model into a folder that transformers loads."""

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from luna_mega.convert.dictionary import Dictionaries, assign_dictionaries, assign_pair
from luna_mega.convert.ema_convention import CHOICES as EMA_CHOICES, decide_ema_convention
from luna_mega.convert.fairseq_reader import Checkpoint, read_checkpoint
from luna_mega.convert.layer_norm import CHOICES, LayerNormDecision, decide_layer_norm
from luna_mega.convert.mapping import Mapping, convert_tensors, few, map_tensors, without_memory
from luna_mega.convert.plan import Plan
from luna_mega.convert.plans import make_plan
from luna_mega.convert.report import FILE_NAME, Report
from luna_mega.convert.source_detect import Source, canonical, detect
from luna_mega.convert.source_norms import save_source_norms
from luna_mega.convert.tokenizer import ConvertedTokenizer, convert_tokenizer
from luna_mega.errors import ConversionError
from luna_mega.hub.card import conversion_card
from luna_mega.hub.output import check_output, complete_folder

DTYPES = ("float32", "float16", "bfloat16")


def convert_checkpoint(
    path: str | Path,
    output: str | Path,
    *,
    dictionaries: Sequence[str | Path] = (),
    bpe: str | Path | None = None,
    head: str | None = None,
    layer_norm: str = "auto",
    ema_convention: str = "auto",
    dtype: str = "float32",
    license: str | None = None,
) -> Report:
    """Converts a luna_bert, Luna LRA, or Mega LRA, speech, LM or translation checkpoint; nothing in it is executed.

    Args:
        path: the checkpoint that fairseq saved.
        output: folder to write, absent or empty; after a failure it is as it was.
        dictionaries: vocabulary and label dictionary, or dictionaries of source and target, in any order, told apart by
            name and size; when none is given they are looked for beside the checkpoint.
        bpe: folder with GPT-2's BPE files, for the tokenizer of a luna_bert model, or of a Mega language model whose
            symbols are GPT-2's ids; for translation the codes of a byte-pair encoding. The others need only the
            dictionary.
        head: name of the luna_bert classification head to convert; None = the only head of a fine-tuned model, else
            masked LM.
        layer_norm: "auto", "standard" or "plus-one" (the 2023 code of Luna stores weight - 1).
        ema_convention: "auto", "main" or "flash": the branch of the Mega code, by the order of the tensors or as given.
        dtype: "float32", "float16" or "bfloat16".
        license: identifier of the licence of the weights, for the model card; None = the card says that none is stated.

    Returns:
        The report that is also written as conversion_report.json.

    Raises:
        ConversionError: the input is at fault; one line names the file or field and the way out.
        ValueError: an option has no such value.
    """
    given = (
        ("layer_norm", layer_norm, CHOICES),
        ("ema_convention", ema_convention, EMA_CHOICES),
        ("dtype", dtype, DTYPES),
    )
    for name, value, choices in given:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    output = check_output(output)
    checkpoint = read_checkpoint(path)
    tensors = canonical(checkpoint)
    source, plan, mapping, norm = _understand(checkpoint, tensors, head, layer_norm, ema_convention)
    found = _find_dictionaries(plan, list(dictionaries), checkpoint.path.parent)
    if found.labels is not None:
        plan.config.id2label = dict(enumerate(found.labels.labels))
        plan.config.label2id = {label: index for index, label in plan.config.id2label.items()}
    tokenizer = convert_tokenizer(plan, source.layout, found.vocabulary, bpe, found.target)
    plus_one = norm is not None and norm.convention == "plus-one"
    converted = convert_tensors(plan, mapping, tensors, plus_one, getattr(torch, dtype))
    report = _report(output, checkpoint, source, plan, mapping, norm, found, tokenizer, converted)
    with complete_folder(output) as folder:
        if plus_one:
            save_source_norms({key: tensors[key] for key in mapping.norm_weights}, folder)
        _write(folder, plan, converted, found, tokenizer, report, license)
    return report


def _find_dictionaries(plan: Plan, given: list[str | Path], beside: Path) -> Dictionaries:
    if plan.languages is None:
        return assign_dictionaries(given, beside, plan.vocab_size, plan.appended_symbol, plan.num_labels)
    joint = plan.config.share_encoder_decoder_embeddings
    return assign_pair(given, beside, plan.languages, (plan.vocab_size, plan.target_vocab_size), joint)


def _check_options(source: Source, head: str | None, layer_norm: str, ema_convention: str) -> None:
    """Refuse an option that is about another kind of file."""
    if head is not None and source.layout != "luna_bert":
        raise ConversionError(f"--head {head}: only luna_bert files have heads with names; leave the option out")
    if layer_norm != "auto" and source.is_mega:
        raise ConversionError(f"--layer-norm {layer_norm}: Mega stores norm weights as they are; leave the option out")
    if ema_convention != "auto" and not source.is_mega:
        raise ConversionError(f"--ema-convention {ema_convention}: Luna has no moving average; leave the option out")


def _understand(
    checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], head: str | None, layer_norm: str, ema_convention: str
) -> tuple[Source, Plan, Mapping, LayerNormDecision | None]:
    source = detect(checkpoint)
    norm = average = None
    try:
        _check_options(source, head, layer_norm, ema_convention)
        if source.is_mega:
            average = decide_ema_convention(tensors, ema_convention)
            source = replace(source, revision=average.convention)
        plan = make_plan(source, tensors, checkpoint.args, head)
        mapping = map_tensors(plan, tensors)
        if mapping.norm_weights:
            norm = decide_layer_norm([tensors[key] for key in mapping.norm_weights], layer_norm)
    except ConversionError as error:
        raise ConversionError(f"{checkpoint.path}: {error}") from error
    plan.warnings += [decision.warning for decision in (average, norm) if decision and decision.warning]
    return source, plan, mapping, norm


def _report(
    output: Path,
    checkpoint: Checkpoint,
    source: Source,
    plan: Plan,
    mapping: Mapping,
    norm: LayerNormDecision | None,
    found: Dictionaries,
    tokenizer: ConvertedTokenizer | None,
    converted: dict[str, torch.Tensor],
) -> Report:
    non_finite = [target for target, tensor in converted.items() if not tensor.isfinite().all()]
    warnings = [*plan.warnings, *found.warnings]
    if non_finite:
        warnings.append(f"NaN or Inf in {len(non_finite)} of {len(converted)} tensors: {few(non_finite)}")
    tensors, model = canonical(checkpoint), without_memory(plan.model_class, plan)
    statistics = {name for name, _ in model.named_buffers()}
    shape = {key: list(tensor.shape) for key, tensor in tensors.items()}
    early = ["early file: its prefix 'decoder.' is today's 'encoder.'"] * (tensors.keys() != checkpoint.tensors.keys())
    return Report(
        output=str(output),
        source={
            "file": checkpoint.path.name,
            "sha256": checkpoint.sha256,
            "serialization": checkpoint.serialization,
            "layout": source.layout,
            "revision": source.revision,
            "arch": source.arch,
            "task": checkpoint.args.get("task"),
            "num_updates": checkpoint.num_updates,
        },
        model_class=plan.model_class.__name__,
        decisions=({"layer_norm": norm.convention, "layer_norm_mean": norm.mean} if norm else {}) | plan.decisions,
        mapped=[{"source": key, "target": target, "shape": shape[key]} for key, target in mapping.mapped.items()],
        dropped=[{"source": key, "shape": shape[key], "reason": reason} for key, reason in mapping.dropped.items()],
        dtype_in=dict(Counter(_name(tensor.dtype) for tensor in tensors.values())),
        dtype_out=_name(next(iter(converted.values())).dtype),
        parameters={
            "model": model.num_parameters(),
            "file": sum(tensor.numel() for name, tensor in converted.items() if name not in statistics),
        },
        non_finite=non_finite,
        tokenizer=tokenizer and tokenizer.summary,
        args=dict(checkpoint.args),
        notes=[*plan.notes, *found.notes, *early],
        warnings=warnings,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dictionary_files(found: Dictionaries) -> dict[str, Path]:
    roles = {"dict.txt": found.vocabulary, "dict.label.txt": found.labels}
    if found.target is not found.vocabulary:
        roles["dict.target.txt"] = found.target
    return {name: dictionary.path for name, dictionary in roles.items() if dictionary is not None}


def _write(
    folder: Path,
    plan: Plan,
    converted: dict,
    found: Dictionaries,
    tokenizer: ConvertedTokenizer | None,
    report: Report,
    license: str | None,
) -> None:
    dtype = next(iter(converted.values())).dtype
    model = without_memory(plan.model_class, plan).to(dtype)
    if plan.generation:
        model.generation_config.update(**plan.generation)
    try:
        model.save_pretrained(folder, state_dict=converted, max_shard_size="50GB")
    except SafetensorError as error:  # what safetensors makes of a full disk
        raise ConversionError(f"{report.output}: cannot write model.safetensors: {error}") from error
    for name, path in _dictionary_files(found).items():
        shutil.copyfile(path, folder / name)
    if tokenizer is not None:
        tokenizer.save(folder)
    card = conversion_card(
        Path(report.output).name,
        report.model_class,
        plan.config,
        report.source,
        str(report),
        parameters=report.parameters["model"],
        tokenizer=tokenizer is not None,
        license=license,
    )
    card.save(folder / "README.md")
    report.files = [*sorted(file.name for file in folder.iterdir()), FILE_NAME]
    report.save(folder)
