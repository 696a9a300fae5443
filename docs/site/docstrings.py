"""Docstrings as the API reference shows them: with the types and defaults of fields, and the arguments of all heads."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIELDS = re.compile(r"^        ((?:\w+, )*\w+): ", re.MULTILINE)
# Arguments of heads that `LunaModel.forward` and its like do not have.
HEAD_ARGUMENTS = {
    "token_type_ids": "must be 0.",
    "labels": "targets of the loss, see above. None = no loss.",
    "start_positions": "first columns of the answers, see above. None = no loss.",
    "end_positions": "last columns of the answers, see above. None = no loss.",
    "logits_to_keep": "number of last positions, or positions, for which logits are computed. 0 = all.",
}


def complete_docstrings(source: str) -> str:
    """Add what the reference shows and the code has elsewhere to the docstrings of a module.

    These are the types and defaults of the fields of configurations, and the arguments of the heads.
    """
    for node in ast.parse(source).body:
        docstring = isinstance(node, ast.ClassDef) and ast.get_docstring(node, clean=False)
        if docstring and node.name.endswith("Config"):
            source = source.replace(docstring, add_types(node, docstring))
        elif docstring and ("For" in node.name or node.name == "Seq2SeqLM"):
            source = add_arguments(node, source)
    return source


def add_types(config: ast.ClassDef, docstring: str) -> str:
    """Write `hidden_size (int, defaults to 768): ...` for `hidden_size: ...`, and add fields that have no line."""
    fields = {field.target.id: field for field in config.body if isinstance(field, ast.AnnAssign) and field.value}

    def describe(found: re.Match) -> str:
        named = [fields[name] for name in found[1].split(", ") if name in fields]
        if not named:
            return found[0]
        types, defaults = (
            ", ".join(dict.fromkeys(ast.unparse(part) for part in parts))
            for parts in ([field.annotation for field in named], [field.value for field in named])
        )
        return f"        {found[1]} ({types}, defaults to {defaults}): "

    described = {name for names in FIELDS.findall(docstring) for name in names.split(", ")}
    others = [name for name in fields if name not in described]
    rest = [f"        {name}: See the fields above, or `PreTrainedConfig`.\n" for name in others]
    return FIELDS.sub(describe, docstring.replace("\n    Raises:", f"{''.join(rest)}\n    Raises:"))


def add_arguments(head: ast.ClassDef, source: str) -> str:
    """Append `Args` to the docstring of a head's `forward`, with the descriptions of its base model."""
    forward = next((part for part in head.body if isinstance(part, ast.FunctionDef) and part.name == "forward"), None)
    docstring = forward and ast.get_docstring(forward, clean=False)
    if not docstring or "Args:" in docstring:
        return source
    family = (re.match("Luna|Megalodon|Mega", head.name) or ["Luna"])[0]
    if head.name == "Seq2SeqLM":
        described = base_arguments("modeling_common/seq2seq.py", "Seq2SeqBody")
    else:
        module = f"modeling_{family.lower()}"
        described = base_arguments(f"{module}/{module}.py", f"{family}Model")
    described = HEAD_ARGUMENTS | described
    lines = []
    for argument in [*forward.args.args[1:], *forward.args.kwonlyargs]:
        name = argument.arg.removeprefix("pair_")
        text = described[name] if name == argument.arg else f"the same as `{name}`, of the second sequences."
        if head.name.endswith("MultipleChoice"):
            text = text.replace("`[B, T", "`[B, C, T")
        lines.append(f"            {argument.arg}: {text}\n")
    head_end, raises, errors = docstring.partition("        Raises:")
    arguments = f"\n\n        Args:\n{''.join(lines)}\n        "
    return source.replace(docstring, f"{head_end.rstrip()}{arguments}{(raises + errors).strip()}", 1)


@cache
def base_arguments(file: str, name: str) -> dict[str, str]:
    """Return the descriptions of the arguments of `forward` of a model without a head."""
    source = (ROOT / file).read_text(encoding="utf-8")
    base = next(node for node in ast.parse(source).body if getattr(node, "name", "") == name)
    forward = next(part for part in base.body if getattr(part, "name", "") == "forward")
    arguments = ast.get_docstring(forward).split("Args:\n")[1].split("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", arguments, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}
