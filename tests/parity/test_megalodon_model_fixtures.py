"""Megalodon against the original: outputs of every layer, gradients, caches, generated tokens, windows.

The tolerances are absolute: 1e-5 times the largest value if that is above 1, and for gradients 2e-5 times the largest
value of the tensor. The weights are loaded from the consolidated files by name; a few names differ.
"""

import re

import pytest
import torch

from luna_mega import MegalodonConfig, MegalodonForCausalLM
from tests.marks import slow_but
from tests.parity.original import Original, originals

CASES = [
    "01_base_fused",
    "02_swiglu_scaled_shared_eager",
    "03_noaffine_rescale_swift",
    "04_eager_outputsize_extravocab",
    "05_sharded_mp2",
    "06_bf16_checkpoint",
]
NAMES = [
    (r"^embed\.", "megalodon.embed_tokens."),
    (r"^output\.final_norm", "megalodon.final_norm"),
    (r"^output\.output", "lm_head"),
    (r"^(layers|rope)\.", r"megalodon.\1."),
    (r"\.timenorm\.", ".timestep_norm."),
]
FIELDS = {
    "model_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "z_dim": "shared_representation_size",
    "value_dim": "value_size",
    "ffn_hidden_dim": "intermediate_size",
    "cema_ndim": "ema_projection_size",
    "norm_num_groups": "norm_num_groups",
    "chunk_size": "chunk_size",
    "norm_eps": "norm_eps",
    "norm_affine": "norm_affine",
    "swiglu": "swiglu",
    "rescale_nffn": "rescale_nffn",
    "scale_emb": "scale_embedding",
    "share_emb": "tie_word_embeddings",
    "init_mode": "initializer",
    "vocab_size": "vocab_size",
}
# How model-parallel ranks store a tensor: sharded along a dimension, or replicated.
ROWS = r"(mega\.(wz|wv|wr|wh1|timenorm|cema)\.|nffn\.(fc1|fc3)\.|final_norm\.)(?!.*prior_count)"
COLUMNS = r"(^embed\.|^output\.output\.|mega\.wh2\.|nffn\.fc2\.|mega\.(gamma|beta)$)"


def our_name(name):
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def joined(parts):
    """Return the state dict merged from all ranks."""
    weights = {}
    for name, first in parts[0].items():
        tensors = [part[name] for part in parts]
        if re.search(ROWS, name) or re.search(COLUMNS, name):
            weights[name] = torch.cat(tensors, 0 if re.search(ROWS, name) else 1)
        else:
            assert all(torch.equal(tensor, first) for tensor in tensors), name
            weights[name] = first
    return weights


class Case(Original):
    def __init__(self, *folders):
        super().__init__(*folders)
        original = self.meta["config"]
        self.fields = {ours: original[theirs] for theirs, ours in FIELDS.items()}
        self.fields["rope_theta"] = original["rope_base"] or 10000.0
        self.fields["output_size"] = None if original["output_size"] == -1 else original["output_size"]
        files = sorted(self.folder.glob("consolidated*.pth"))
        weights = joined([torch.load(file, weights_only=True) for file in files])
        self.state = {our_name(name): tensor.float() for name, tensor in weights.items()}
        self.chunk, self.model = original["chunk_size"], self.build()

    def build(self, **fields):
        model = MegalodonForCausalLM(MegalodonConfig(**self.fields | fields)).eval()
        model.load_state_dict(self.state, strict=True)
        return model


@pytest.fixture(params=CASES)
def case(request, parity_folder, outputs):
    return Case(parity_folder("megalodon", request.param), outputs)


def check(parity, name, actual, expected):
    parity.check(name, actual, expected, atol=1e-5, rtol=0.0, scaled=True)


def check_gradient(parity, name, actual, expected):
    parity.check(name, actual, expected, atol=2e-5 * max(1e-3, expected.abs().max().item()), rtol=0.0)


def losses(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def traced(model, ids, **options):
    """Return the output, and the inputs and outputs of submodules under the fixtures' names."""
    seen, body = {}, model.megalodon
    attention = body.layers[0].mega.attention

    def remember(name):
        return lambda module, inputs, output: seen.__setitem__(name, output)

    def look_at_attention(module, inputs, output):
        seen.update(zip(("q.0", "k.0", "v.0"), (*inputs[0], inputs[1]), strict=True), **{"attn.0": output[0]})

    hooks = [attention.register_forward_hook(look_at_attention)]
    modules = {"embed": body.dropout, "final_norm": body.final_norm}
    for index, block in enumerate(body.layers):
        modules |= {f"timenorm.{index}": block.mega.timestep_norm, f"cema.{index}": block.mega.cema}
        modules |= {f"mega.{index}": block.mega, f"block.{index}": block}
    hooks += [module.register_forward_hook(remember(name)) for name, module in modules.items()]
    output = model(ids, **options)
    for hook in hooks:
        hook.remove()
    return output, seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_states_losses_and_gradients(case, parity, attention):
    case.model.set_attn_implementation(attention)
    for length in "ABC":
        expected = case.starting_with(f"{length}.")
        gradients = {name[5:]: expected.pop(name) for name in list(expected) if name.startswith("grad.")}
        ids, targets = expected.pop("ids"), expected.pop("targets")
        output, seen = traced(case.model, ids, use_cache=False)
        token_loss = losses(output.logits, targets)
        seen |= {"logits": output.logits, "token_loss": token_loss, "loss": token_loss.mean()}
        for name, tensor in expected.items():
            check(parity, f"{length}.{name}", seen[name].view_as(tensor), tensor)
        case.model.zero_grad()
        token_loss.mean().backward()
        parameters = dict(case.model.named_parameters())
        assert length != "C" or {our_name(name) for name in gradients} >= parameters.keys()
        for name, gradient in gradients.items():
            if our_name(name) in parameters:  # a tied matrix has only one name
                check_gradient(parity, f"{length}.grad.{name}", parameters[our_name(name)].grad, gradient)


def check_cache(case, parity, past, read):
    """Compare the cached tensors after `read` tokens with the original's."""
    prefix, held = f"stream.cache.{read}", read % case.chunk
    for index, layer in enumerate(past.layers):
        expected = {name: case.io[f"{prefix}.{index}.{name}"] for name in ("k", "v", "norm_mean", "norm_var", "h")}
        assert case.io[f"{prefix}.{index}.held"] == held and (layer.position == read).all()
        assert torch.equal(layer.norm_count, case.io[f"{prefix}.{index}.norm_count"])
        actual = {"norm_mean": layer.norm_mean.float(), "norm_var": layer.norm_variance.float(), "h": layer.average}
        for name, tensor in (("k", layer.keys), ("v", layer.values)):
            actual[name] = tensor[:, :held].unflatten(2, (case.model.config.num_attention_heads, -1))
            if held == 0:
                assert actual.pop(name).shape == expected.pop(name).shape
        for name, tensor in expected.items():
            check(parity, f"{prefix}.{index}.{name}", actual[name], tensor)
    last = past.layers[-1]
    assert torch.equal(last.final_count, case.io[f"{prefix}.final_count"])
    check(parity, f"{prefix}.final_mean", last.final_mean.float(), case.io[f"{prefix}.final_mean"])
    check(parity, f"{prefix}.final_var", last.final_variance.float(), case.io[f"{prefix}.final_var"])


@torch.no_grad()
@pytest.mark.parametrize("case", slow_but(CASES[1:3], CASES), indirect=True)
def test_streams_and_caches(case, parity):
    """Results and caches equal the original's token by token, after a prompt and in one call."""
    ids, chunk = case.io["stream.ids"], case.chunk
    total, cached = ids.shape[1], {int(name.split(".")[2]) for name in case.io if name.startswith("stream.cache.")}
    assert cached == {3, chunk, chunk + 2, 2 * chunk, total}
    for name, pieces in (("steps", [1] * total), ("prefill", [2 * chunk, 3] + [1] * (total - 2 * chunk - 3))):
        past, logits, read = None, [], 0
        for piece in ids.split(pieces, dim=1):
            output = case.model(piece, cache=past, use_cache=True)
            past, read = output.cache, read + piece.shape[1]
            logits.append(output.logits)
            if read in cached:
                check_cache(case, parity, past, read)
        check(parity, f"stream.{name}", torch.cat(logits, 1), case.io[f"stream.{name}.logits"])
    check(parity, "stream in one call", case.model(ids, use_cache=False).logits, case.io["stream.steps.logits"])
    for read in cached:
        past = case.model(ids[:, :read], use_cache=True).cache
        check_cache(case, parity, past, read)


@torch.no_grad()
@pytest.mark.parametrize("case", slow_but(CASES[2:4], CASES), indirect=True)
def test_windowed_statistics(case, parity):
    """Losses equal those of the original's inference, with windowed statistics and with statistics of all positions."""
    ids, targets = case.io["window.ids"], case.io["window.targets"]
    complete = losses(case.model(ids).logits, targets)
    check(parity, "not windowed", complete, case.io["window.token_loss_not_windowed"])
    windowed = losses(case.build(windowed_statistics=True)(ids, use_cache=False).logits, targets)
    check(parity, "windowed", windowed, case.io["window.token_loss"])
    early, late = (windowed - complete).abs().split([8 * case.chunk, ids.shape[1] - 8 * case.chunk], dim=1)
    assert early.max() < 1e-5 and late.max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("case", slow_but(CASES[:2], CASES), indirect=True)
def test_greedy_tokens(case):
    """Greedy tokens equal the original's.

    Prompts of different lengths are left-padded in one batch; one prompt is longer than a window.
    """
    for kind, greedy in case.meta["greedy"].items():
        model = case.build(windowed_statistics=True) if kind == "long_windowed" else case.model
        prompts, expected = greedy["prompt_ids"], torch.tensor(greedy["tokens"])
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"do_sample": False, "max_new_tokens": expected.shape[1], "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, attention_mask=mask, **options)[:, width:], expected), kind


@torch.no_grad()
@pytest.mark.parametrize("case", ["06_bf16_checkpoint"], indirect=True)
def test_half_precision_matches_the_original(case):
    """Results in bfloat16 are about as close to float32 as the original's, which differ by 1e-2."""
    model, ids, expected = case.build().bfloat16(), case.io["C.ids"], case.io["C.logits"]
    ours = (model(ids).logits.float() - expected).abs().max()
    assert ours <= 1.5 * (case.io["bf16.C.logits"].float() - expected).abs().max()
    assert torch.equal(case.model.megalodon.rope.freqs, case.io["bf16.rope_freqs"].float())


@torch.no_grad()
@pytest.mark.parametrize("reading", ["one hop", "scales as stored"])
@pytest.mark.parametrize("case", ["02_swiglu_scaled_shared_eager"], indirect=True)
def test_other_interpretations_fail(case, reading):
    """Results differ with the usual residual, or without the 1 that is added to scales."""
    block = case.model.megalodon.layers[0]
    if reading == "one hop":
        run = block.nffn.forward
        block.nffn.forward = lambda x, residual: run(x, x)
    else:
        for name, parameter in block.named_parameters():
            if name.endswith(("norm.weight", "mega.gamma")):
                parameter.sub_(1.0)
    assert (case.model(case.io["C.ids"]).logits - case.io["C.logits"]).abs().max() > 1e-2


@pytest.mark.parametrize("initializer", ["he", "bert", "xavier", "gaussian"])
@originals("megalodon", ["14_initial_values"])
def test_initial_values(original, parity, initializer):
    """Initial values have the original's standard deviation and bounds, estimated from samples.

    Frequencies are equal, in a random order.
    """
    meta = original.meta
    sizes = {ours: meta["config"][theirs] for theirs, ours in FIELDS.items() if theirs in meta["config"]}
    state = MegalodonForCausalLM(MegalodonConfig(**sizes, initializer=initializer)).state_dict()
    for name, expected in meta["statistics"][initializer].items():
        tensor = state[our_name(name)].double()
        bound = max(abs(expected["min"]), abs(expected["max"]))
        assert list(tensor.shape) == expected["shape"] and tensor.abs().max() <= 1.5 * bound, name
        if expected["std"] < 1e-9 * bound or bound == 0.0:
            assert (tensor - expected["mean"]).abs().max() < 1e-7, name
        else:
            assert abs(tensor.std() / expected["std"] - 1.0) < 6.0 * tensor.numel() ** -0.5, name
    theta = state["megalodon.layers.1.mega.cema.theta"].flatten()
    check(parity, "theta", theta.sort().values, original.io["theta_sorted"])
    assert not torch.equal(theta, theta.sort().values)
    assert not state["megalodon.layers.0.mega.cema.gamma"][..., 1].any()
