"""Public surface of the models as tables in `surface.json`; `python -m tests.modeling.test_surface` writes them.

The tables record what must not change when the models are refactored: signatures, fields of configurations and of
presets, weights and their initialization, and outputs, which the contract only compares with each other. Run it after a
deliberate change.
"""

import hashlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

import luna_mega
from tests.modeling.contract import MEMBERS, Batch, collate, prepare, run

TABLES = Path(__file__).with_name("surface.json")


def signatures():
    """Return the parameters of every public `forward`."""
    table = {}
    for name in sorted(luna_mega.__all__):
        cls = getattr(luna_mega, name)
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
            texts = [str(x.replace(annotation=inspect.Parameter.empty)) for x in parameters]
            named = [index for index, x in enumerate(parameters) if x.kind is x.KEYWORD_ONLY]
            if named:
                texts.insert(named[0], "*")
            table[name] = " ".join(texts)
    return table


def configurations():
    """Return the fields of every public configuration and their defaults, without the common ones of transformers."""
    configs = {
        name: getattr(luna_mega, name)().to_dict() for name in sorted(luna_mega.__all__) if name.endswith("Config")
    }
    common = set(PreTrainedConfig().to_dict()) | {"transformers_version"}
    return {name: {key: config[key] for key in sorted(set(config) - common)} for name, config in configs.items()}


def presets():
    """Return the fields of every preset that differ from the defaults of its configuration."""
    table = {}
    for family in ("Luna", "Mega", "Megalodon"):
        config_class = getattr(luna_mega, f"{family}Config")
        (base,) = [base for base in config_class.__mro__ if base.__name__ == f"{family}Presets"]
        for name in sorted(name for name, value in vars(base).items() if isinstance(value, classmethod)):
            if name.startswith("_"):
                continue
            preset = getattr(config_class, name)
            vocabulary = inspect.signature(preset).parameters.get("vocab_size")
            needed = [40] if vocabulary is not None and vocabulary.default is vocabulary.empty else []
            config = preset(*needed)
            default, fields = (json.loads(json.dumps(x.to_dict())) for x in (type(config)(), config))
            differ = {key: fields[key] for key in sorted(fields) if "label" not in key and fields[key] != default[key]}
            table[f"{family}: {name}"] = differ | {"num_labels": config.num_labels}
    return table


def members():
    """Return the results of `numbers_of` for every member of the contract."""
    return {name: numbers_of(name) for name in MEMBERS}


def numbers_of(name):
    """Return a digest of the names and shapes of a member's weights, and the numbers that must not change.

    These are the magnitude of its weights, and the loss and the magnitudes of results and gradients of a padded batch.
    """
    member, batch = MEMBERS[name], Batch("left")
    model = prepare(member, batch, "dense")
    state = model.state_dict()
    names = "\n".join(f"{name} {list(tensor.shape)}" for name, tensor in state.items())
    tensors = [torch.cat([x.double().flatten() for x in state.values()])]
    loss, gradients, results = run(model, *collate(member, batch))
    tensors += [loss, *results.values(), torch.cat([x.flatten() for x in gradients.values()])]
    numbers = [float(f"{x.detach().double().abs().sum():.9g}") for x in tensors]
    return [hashlib.sha256(names.encode()).hexdigest()[:12], *numbers]


def _one_line_each(tables):
    texts = []
    for name, table in tables.items():
        rows = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        texts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(texts) + "\n}\n"


RECORDED = json.loads(TABLES.read_text(encoding="utf-8"))


def is_recorded(name):
    """Return whether the installed torch initializes a model with the recorded numbers.

    For Megalodon, newer versions of torch draw truncated normal numbers by rejection; older versions do not.
    """
    drawn = []
    for draw in (torch.Tensor.normal_, nn.init.trunc_normal_):
        torch.manual_seed(0)
        drawn.append(draw(torch.empty(1)))
    return "megalodon" not in name or drawn[0].equal(drawn[1])


@pytest.mark.parametrize("table", ["signatures", "configurations", "presets"])
def test_surface(table):
    assert globals()[table]() == RECORDED[table]


@pytest.mark.parametrize("name", MEMBERS)
def test_members(name):
    # The instructions of a processor change the last bit of the normal numbers that torch draws in float32: the sums
    # differ from the recorded ones by up to 1.1e-7 with AVX2, and without AVX by up to 1.3e-6.
    limit = 1e-5 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 1e-6
    (digest, *numbers), (recorded, *others) = numbers_of(name), RECORDED["members"][name]
    assert digest == recorded
    assert not is_recorded(name) or numbers == pytest.approx(others, rel=limit)


if __name__ == "__main__":
    tables = {x.__name__: x() for x in (signatures, configurations, presets, members)}
    TABLES.write_text(_one_line_each(tables), encoding="utf-8")
