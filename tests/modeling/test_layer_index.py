"""Layers that are removed, reordered or repeated keep their row of `packed_embeddings`, also when saved."""

import copy

import pytest
import torch

from . import decoders, luna, luna_decoders

DEPTH = 4
OWN_ROWS = {"contextual_projection": False, "num_hidden_layers": DEPTH}
MODELS = {
    "decoder": lambda: luna_decoders.make(num_hidden_layers=DEPTH, eos_token_id=None),
    "encoder": lambda: luna.make("ForMaskedLM", **OWN_ROWS).double(),
    "encoder, pooled P": lambda: luna.make("ForSequenceClassification", pooling="packed_mean", **OWN_ROWS).double(),
    "encoder, shared layers": lambda: luna.make("ForMaskedLM", share_layers=True, **OWN_ROWS).double(),
    "model": lambda: luna.make("Model", **OWN_ROWS).double(),
    "encoder-decoder": lambda: luna_decoders.make(is_encoder_decoder=True, num_decoder_layers=2, **OWN_ROWS),
    "Mega": lambda: decoders.FAMILIES["mega"].make(num_hidden_layers=DEPTH),
    "Megalodon": lambda: decoders.FAMILIES["megalodon"].make(num_hidden_layers=DEPTH),
}
CHOICES = {"fewer": [0, 3], "reordered": [2, 0, 3, 1], "repeated": [1, 1, 0, 3, 2], "one": [3]}


def body(model):
    """Return the base model that has the layers, and the module that contains their list."""
    found = model.base_model
    found = found.encoder if model.config.is_encoder_decoder else found
    return found, getattr(found, "decoder" if found.config.is_decoder else "encoder", found)


def choose(model, chosen):
    """Keep only the chosen layers of a model, as a user would do."""
    found, stack = body(model)
    if not model.config.to_dict().get("share_layers"):
        stack.layers = torch.nn.ModuleList(copy.deepcopy(stack.layers[index]) for index in chosen)
    for config in {id(x.config): x.config for x in (model, found)}.values():
        config.num_hidden_layers = len(chosen)
    return model


def expected(model, chosen):
    """Return a new model with the weights of these layers and their rows of P."""
    model = choose(copy.deepcopy(model), chosen)
    found, _ = body(model)
    weights = model.state_dict()
    for name in [name for name in weights if name.endswith("packed_embeddings")]:
        weights[name] = weights[name][[*range(len(chosen))] if found.config.share_layers else chosen]
    new = type(model)(copy.deepcopy(model.config)).double().eval()
    new.load_state_dict(weights)
    return new


def outputs(model):
    ids, mask = decoders.padded([9, 4], 11, "right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    return model(**inputs, output_hidden_states=True)


def assert_equal(model, reference):
    actual, wanted = outputs(model), outputs(reference)
    for name in ("logits", "last_hidden_state", "packed_hidden_states", "encoder_packed_hidden_states"):
        if wanted.get(name) is not None:
            torch.testing.assert_close(actual[name], wanted[name], msg=lambda text, name=name: f"{name}: {text}")


# Choice of layers, and whether weights are passed to `save_pretrained`, as Trainer does.
CASES = [
    ("decoder", "repeated", False),
    ("encoder", "reordered", True),
    ("encoder, pooled P", "repeated", True),
    ("encoder, shared layers", "fewer", False),
    ("model", "one", True),
    ("encoder-decoder", "repeated", False),
    ("Mega", "reordered", False),
    ("Megalodon", "repeated", True),
]


@pytest.mark.parametrize(("name", "choice", "as_trainer"), CASES)
def test_outputs_and_folder(name, choice, as_trainer, tmp_path):
    model, chosen = MODELS[name](), CHOICES[choice]
    reference = expected(model, chosen)
    choose(model, chosen)
    assert_equal(copy.deepcopy(model), reference)
    before = {key: value.shape for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=model.state_dict() if as_trainer else None)
    assert {key: value.shape for key, value in model.state_dict().items()} == before
    assert_equal(model, reference)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert_equal(loaded.double().eval(), reference)


@pytest.mark.parametrize(("name", "choice"), [("decoder", "repeated"), ("Mega", "fewer"), ("Megalodon", "repeated")])
def test_cache(name, choice):
    """Two layers with the same weights, and therefore the same `layer_idx`, have separate caches."""
    model = choose(MODELS[name](), CHOICES[choice])
    ids, _ = decoders.padded([12, 12], 12, "right")
    at_once, cache, steps = model(ids, use_cache=False).logits, None, []
    for part in ids.split([5, 1, 1, 5], dim=1):
        output = model(part, cache=cache, use_cache=True)
        cache, steps = output.cache, [*steps, output.logits]
    torch.testing.assert_close(torch.cat(steps, dim=1), at_once)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**prompt, use_cache=True), model.generate(**prompt, use_cache=False))


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_gradient_checkpointing(name):
    """Only the used rows of P get gradients, and checkpointing does not change them."""
    gradients = []
    for again in (False, True):
        model = choose(MODELS[name](), CHOICES["fewer"]).train()
        if again:
            model.gradient_checkpointing_enable()
        logits = model(torch.arange(4, 16)[None], **({"use_cache": False} if name == "decoder" else {})).logits
        logits.square().sum().backward()
        gradients.append(body(model)[0].embeddings.packed_embeddings.grad)
    assert [bool(rows.any()) for rows in gradients[0]] == [True, False, False, True]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_packed_states_replace_every_row():
    model = choose(luna.make("Model", **OWN_ROWS), CHOICES["fewer"])
    given = torch.randn(2, 6, 24)
    results = [model(torch.full((2, 8), 5), packed_states=given).last_hidden_state]
    model.embeddings.packed_embeddings.data.fill_(torch.nan)
    results.append(model(torch.full((2, 8), 5), packed_states=given).last_hidden_state)
    assert torch.equal(*results) and results[0].isfinite().all()
