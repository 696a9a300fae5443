"""Public surface of the models as tables in `surface.json`; `python -m tests.modeling.surface` writes them.

The tables record what must not change when the models are refactored: signatures, fields of configurations and their
defaults, weights and their initialization, and outputs.
"""

import hashlib
import inspect
import json
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

import luna_mega

from . import decoders, luna, mega, test_losses_of_rows as layouts

TABLES = Path(__file__).with_name("surface.json")
HEADS = {f"luna: {head}": (luna, head) for head in luna.HEADS} | {f"mega: {head}": (mega, head) for head in luna.HEADS}


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


def weights():
    """Return the number of initial weights of every class, a digest of names and shapes, and the sum of magnitudes."""
    table = {}
    for name, (family, head) in HEADS.items():
        table[name] = _weights(family.HEADS[head], family.tiny_config())
    for name in decoders.DECODERS:
        model = decoders.make(name)
        table[name] = _weights(type(model), model.config)
    return table


def _weights(model_class, config):
    torch.manual_seed(0)
    state = model_class(config).state_dict()
    names = "\n".join(f"{name} {list(tensor.shape)}" for name, tensor in state.items())
    return [len(state), hashlib.sha256(names.encode()).hexdigest()[:12], sum(_numbers(state.values()))]


def _numbers(tensors):
    return [float(f"{x.detach().double().abs().sum():.9g}") for x in tensors]


def outputs():
    """Return the loss and the magnitudes of results and gradients of every class for a batch with padding."""
    table = {}
    for case in layouts.CASES:
        loss, gradients, results = layouts.run(layouts.make(case), *layouts.collate(case, "left"))
        table[case] = _numbers([loss, *results.values(), torch.cat([x.flatten() for x in gradients.values()])])
    return table


def build():
    """Return all tables."""
    return {x.__name__: x() for x in (signatures, configurations, weights, outputs)}


def _one_line_each(tables):
    texts = []
    for name, table in tables.items():
        rows = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        texts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(texts) + "\n}\n"


if __name__ == "__main__":
    TABLES.write_text(_one_line_each(build()), encoding="utf-8")
