"""The choice of an export: the format, and its revision, that can express a model."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.formats import Format, registered_formats
from luna_mega.convert.formats.registry import find_format
from luna_mega.convert.plan import Target
from luna_mega.errors import ConversionError, shown


def choose_target(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, head: str | None, report: dict[str, Any]
) -> tuple[Format, Target]:
    """Return the format that can express the model; a converted model keeps the format of its file.

    Args:
        model_class, config: the model.
        head: the option `--head`.
        report: the record of the conversion.

    Raises:
        ConversionError: no format has the head, or the best one lacks a value of the configuration.
    """
    given = report["source"]
    formats = [find_format(given["layout"])] if given else registered_formats()
    if given and formats[0].assumed(given["revision"]) not in formats[0].revisions:
        raise ConversionError(f"format {given['layout']} has no revision {shown(given['revision'])}")
    wanted = head or report["decisions"].get("head")
    targets = [
        (fmt, Target(model_class, config, revision, wanted if _names_heads(fmt, model_class) else None))
        for fmt in formats
        if model_class in fmt.classes
        for revision in ([given["revision"]] if given else fmt.written)
    ]
    if not targets:
        family = [fmt for fmt in registered_formats() if fmt.config_class is type(config)]
        names = sorted({known.__name__ for fmt in family for known in fmt.classes})
        way_out = next((fmt.way_out for fmt in family if fmt.way_out), None)
        layout = formats[0].revisions[given["revision"]].format if given else "the fairseq code"
        raise ConversionError(
            f"{layout} has no head like that of {model_class.__name__}; "
            + (way_out or f"these can be exported: {', '.join(names)}")
        )
    problems = [list(_problems(fmt, target)) for fmt, target in targets]
    best = min(range(len(targets)), key=lambda index: len(problems[index]))
    fmt, target = targets[best]
    if problems[best]:
        layout = fmt.revisions[target.revision].format
        raise ConversionError(f"{layout} cannot express {'; '.join(problems[best])}")
    if head is not None and not _names_heads(fmt, model_class):
        raise ConversionError(f"--head {head}: the original has no named head for a {model_class.__name__}")
    if wanted is not None and not re.fullmatch(r"[\w-]+", wanted):
        raise ConversionError(f"--head {shown(wanted)}: a name has letters, digits, '_' and '-' only")
    if _names_heads(fmt, model_class) and wanted is None:
        target = replace(target, head=fmt.usual_head(config))
    return fmt, target


def _names_heads(fmt: Format, model_class: type) -> bool:
    return fmt.named_heads and model_class in fmt.classifiers


def _problems(fmt: Format, target: Target) -> Iterator[str]:
    for name, allowed in fmt.allowed(target).items():
        value = getattr(target.config, name)
        if value not in allowed:
            yield f"{name} = {value!r} (it has {' or '.join(map(repr, allowed))})"
