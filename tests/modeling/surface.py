"""Public surface of the models as tables in `surface.json`; `python -m tests.modeling.surface` writes them.

The tables record what must not change when the models are refactored: signatures, configuration fields, weights and
their initialization, and outputs in every layout.
"""

import hashlib
import inspect
import json
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

import luna_mega

from . import classes, decoders, luna, mega

TABLES = Path(__file__).with_name("surface.json")
LENGTHS = [9, 1, 14, 6]
ENCODERS = {name.replace(" ", ": ", 1): variant for name, variant in classes.VARIANTS.items()}
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
    """Return the fields of every public configuration, without the common fields of transformers."""
    names = [name for name in sorted(luna_mega.__all__) if name.endswith("Config")]
    return {name: " ".join(sorted(set(getattr(luna_mega, name)().to_dict()) - _base_fields())) for name in names}


def _base_fields():
    return set(PreTrainedConfig().to_dict()) | {"transformers_version"}


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


def outputs(layouts=None):
    """Return the magnitudes of results and gradients of every model in the given layouts (default: all)."""
    return {name: {key: _numbers(tensors) for key, tensors in found.items()} for name, found in results(layouts)}


def results(layouts=None):
    """Yield the name of each model and its results and gradients by layout, in float64."""
    calls = {key: call for key, call in _layouts().items() if layouts is None or key in layouts}
    sides = [side for side in ("left", "right") if layouts is None or side in layouts]
    for name, (family, fields) in ENCODERS.items():
        yield name, {key: _encode(family.make("ForMaskedLM", **fields), *call) for key, call in calls.items()}
    for name, (family, head) in HEADS.items():
        yield name, {side: _apply_head(family.make(head), head, side) for side in sides}
    for name in decoders.DECODERS:
        yield name, _decode(name, sides)


def _layouts():
    """Return the inputs and the configuration fields of an encoder for each layout."""
    padded = {side: luna.tokens(LENGTHS, side) for side in ("left", "right")}
    flat = torch.cat([luna.tokens([length])["input_ids"][0] for length in LENGTHS])[None]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {
        "dense": (luna.tokens([9, 9]), {}),
        **{side: (inputs, {}) for side, inputs in padded.items()},
        "padding-free": ({"input_ids": flat, "cu_seq_lens_q": bounds, "max_length_q": max(LENGTHS)}, {}),
        "unpadded": (padded["left"], {"unpad_inputs": True}),
        "eager": (padded["right"], {"_attn_implementation": "eager"}),
    }


def _encode(model, inputs, fields):
    model = model.double()
    for name, value in fields.items():
        setattr(model.config, name, value)
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    logits = model(**inputs).logits
    logits[kept].sin().sum().backward()
    return [logits[kept], *_gradients(model)]


def _gradients(model):
    return [torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])]


def _apply_head(model, head, side):
    model, inputs = model.double(), luna.head_inputs(head, LENGTHS, side)
    output = model(**inputs, **luna.labels(head, inputs))
    loss = output.loss if head != "Model" else luna.results(head, output, inputs["attention_mask"])[0].sin().sum()
    loss.backward()
    return [loss, *luna.results(head, output, inputs["attention_mask"]), *_gradients(model)]


def _decode(name, sides):
    table = {}
    for side in sides:
        model = decoders.make(name)
        ids, mask = decoders.padded([7, 2, 9], 9, side)
        given = decoders.source(model, 3, side)
        logits = model(**given, **decoders.target(model, ids, mask), use_cache=False).logits
        logits[mask.bool()].sin().sum().backward()
        table[side] = [logits[mask.bool()], *_gradients(model)]
    model.zero_grad()
    ids, mask = decoders.padded([9, 9, 9], 9, "left")
    past, steps = None, []
    with torch.no_grad():
        for part in ids.split([4, 1, 1, 3], dim=1):
            output = model(**given, **decoders.target(model, part), cache=past, use_cache=True)
            past = output.cache
            steps.append(output.logits)
    return table | {"cache": steps}


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
