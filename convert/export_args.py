"""The tensors and args of an export, which must give the same model when they are converted again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from luna_mega.convert.formats import Format
from luna_mega.convert.formats._base import problem_type
from luna_mega.convert.keymap import KeyMap, Reshape
from luna_mega.convert.plan import Plan, Target
from luna_mega.convert.tensors import Mapping, few, map_tensors, tied_weights
from luna_mega.errors import ConversionError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ChosenArgs:
    """The args to write, the plan and mapping of a conversion with them, and warnings about lost settings."""

    args: dict[str, Any]
    plan: Plan
    mapping: Mapping
    warnings: list[str]


def original_tensors(fmt: Format, target: Target, ours: Tensors) -> tuple[Tensors, list[str]]:
    """Return the tensors under the original's names, with the ones that only a file has, and notes on these.

    Raises:
        ConversionError: the original has no place for a tensor.
    """
    tied = tied_weights((target.model_class, *fmt.also_loads), target.config)
    ours = ours | {copy: ours[original] for copy, original in tied.items() if original in ours}
    keymap, tensors = fmt.keymap(target.config, target.revision, target.head), {}
    matches = {name: keymap.backward(name) for name in ours}
    if unknown := [name for name, match in matches.items() if match is None]:
        raise ConversionError(f"{fmt.revisions[target.revision].format} has no place for {few(unknown)}")
    for name, tensor in ours.items():
        match = matches[name]
        tensors[match.key] = match.row.transform.back(tensor) if isinstance(match.row.transform, Reshape) else tensor
    notes = _fill(keymap, tensors)
    return {key: tensors[key] for key in sorted(tensors, key=keymap.position)}, notes


def _fill(keymap: KeyMap, tensors: Tensors) -> list[str]:
    """Add the tensors that a file has and a model lacks: buffers, versions and copies; return notes on them."""
    dtype, notes = next(iter(tensors.values())).dtype, {}
    for row in keymap.rows:
        for name in row.names(list(tensors)) if row.fill else ():
            if name not in tensors:
                tensors[name], notes[row.note] = row.fill(dtype), None
        if row.copy_of in tensors:
            tensors[row.source] = tensors[row.copy_of]
    return list(filter(None, notes))


def choose_args(fmt: Format, target: Target, tensors: Tensors, report: dict[str, Any]) -> ChosenArgs:
    """Return the args of the converted file if they still tell the model, else args made of its configuration.

    Raises:
        ConversionError: the original reads another value of a field from these weights.
    """
    recorded = report["args"]
    kept = {row.name: recorded[row.name] for row in fmt.table if row.kept and row.name in recorded} if recorded else {}
    made = (recorded or {}) | fmt.args(target) | kept
    same_head = recorded is not None and target.head in (None, report["decisions"].get("head"))
    canonical, _ = fmt.canonical(tensors)
    for args in (recorded, made) if same_head else (made,):
        try:
            plan = fmt.plan(fmt.evidence(canonical, args, target.revision), target.head)
            mapping = map_tensors(plan, canonical)
        except ConversionError:
            if args is made:
                raise
            continue  # config.json was edited
        differences = list(_differences(fmt, target, plan))
        if args is made or not differences:
            break
    warnings = [_lost(fmt, *difference) for difference in differences]
    if replaced := sorted(name for name in recorded or {} if recorded[name] != args[name]):
        warnings.append(f"args of the converted file that no longer hold are replaced: {', '.join(replaced)}")
    return ChosenArgs(args, plan, mapping, warnings)


def _differences(fmt: Format, target: Target, plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, the model's value, the planned value) of the fields in use whose two values differ."""
    config, planned, unused = fmt.resolved(target.config), fmt.resolved(plan.config), fmt.unused(target)
    pairs = {
        name: (getattr(config, name), getattr(planned, name))
        for name in (*(config.side_class or type(config)).__annotations__, "num_labels")
    }
    pairs["problem_type"] = problem_type(config), problem_type(planned)
    if target.model_class in fmt.classifiers and plan.model_class is not target.model_class:
        pairs["architectures"] = target.model_class.__name__, plan.model_class.__name__
    for name, (ours, theirs) in pairs.items():
        if name not in unused and ours != theirs:
            yield name, ours, theirs


def _lost(fmt: Format, name: str, ours: Any, theirs: Any) -> str:
    """Return the warning about a field that the original does not have; an error if scores depend on it."""
    if name not in fmt.training_fields:
        raise ConversionError(f"config.json: {name} = {ours!r}, but the original reads {theirs!r} from these weights")
    return f"{name} = {ours!r} is not in the original, which trains with {theirs!r}; scores are the same"
