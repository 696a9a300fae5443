"""Every class, option and recipe that the pages of the papers name in backquotes exists."""

import ast
import inspect
import re
import sys
from functools import cache

import pytest
import yaml

import luna_mega
from luna_mega.kernels import api
from luna_mega.modeling_luna import modeling_luna
from luna_mega.modeling_mega import modeling_mega
from luna_mega.modeling_megalodon import modeling_megalodon
from tests.docs.blocks import ROOT

PAGES = {"luna": modeling_luna, "mega": modeling_mega, "megalodon": modeling_megalodon}
RECIPES = ROOT / "examples" / "recipes"
# Names of the original code, transformers, PyTorch and fairseq.
ELSEWHERE = {
    "XuezheMax/fairseq-apollo", "XuezheMax/megalodon", "facebookresearch/mega", "main", "flash", "mp",
    "luna_large_2048", "truncation_length", "--use-p", "--untie-weights-luna", "--activation-dropout", "</s>",
    "<unk>", "None", "nn.Linear", ".half()", "generate", "from_pretrained", "num_beams", "early_stopping=True",
    "cross_attentions", "cross_packed_attentions", "interpolate_pos_encoding=True", "chunk_size - 1",
}  # fmt: skip


def spans(name: str) -> list[str]:
    """Return what a page has in backquotes."""
    return re.findall(r"`([^`]+)`", (ROOT / "docs" / "papers" / f"{name}.md").read_text(encoding="utf-8"))


@cache
def options(config_class: type) -> set[str]:
    """Return the fields of a configuration, and the options in recipes."""
    recipes = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RECIPES.rglob("*.yaml")]
    return set(config_class.__dataclass_fields__).union(*recipes, ["min_block_size"])


@cache
def parameters(config_class: type, modeling) -> set[str]:
    """Return the names of the parameters and layers of encoders and decoders."""
    names = set()
    for fields in ({"is_decoder": True}, {}) if "is_decoder" in config_class.__dataclass_fields__ else ({},):
        small = {"hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 1, **fields}
        small |= {"norm_num_groups": 1} if hasattr(config_class, "norm_num_groups") else {}
        model = getattr(modeling, config_class.__name__.replace("Config", "Model"))(config_class(**small))
        names |= {part for name in model.state_dict() for part in name.split(".")}
    return names


def exists(span: str, module, config_class: type) -> bool:
    """Return whether a class, option, recipe or parameter exists."""
    if span.endswith(".yaml"):
        return bool([*RECIPES.glob(span)])
    if "/" in span:
        return (ROOT / span).exists()
    if "=" in span:
        # A valid combination of options and values.
        given = {name: ast.literal_eval(value) for name, value in (item.split("=") for item in span.split(", "))}
        return bool(config_class(**given | ({"pooling": "mean"} if "pool_padding" in given else {})))
    if ": " in span:
        return any(line.strip() == span for path in RECIPES.rglob("*.yaml") for line in path.open(encoding="utf-8"))
    if span.startswith('"'):
        return span in inspect.getsource(sys.modules[config_class.__module__])
    scope, _, member = span.partition(".")
    for owner in (luna_mega, module, api):
        if hasattr(owner, scope):
            return not member or hasattr(getattr(owner, scope), member)
    return span in options(config_class) or span in parameters(config_class, module)


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name):
    config_class = getattr(luna_mega, f"{name.capitalize()}Config")
    named = {span for span in spans(name) if "::" not in span} - ELSEWHERE
    assert len(named) > 10
    assert [span for span in sorted(named) if not exists(span, PAGES[name], config_class)] == []
