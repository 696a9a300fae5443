"""The modules of a Mega block against the original: gated attention, feed-forward layer, norms.

The tests compare outputs, weights, all gradients, and the statistics of a training step with batch norm. The causal
layers are also run step by step and in segments.
"""

import pytest
import torch
from torch import nn

from luna_mega import MegaConfig
from luna_mega.kernels.api import use_backend
from luna_mega.kernels.gated_attention import window
from luna_mega.kernels.gated_attention.reference import laplace, relu2
from luna_mega.modeling_common.layout import NO_PADDING, PaddedLayout
from luna_mega.modeling_mega.modeling_mega import (
    MegaCacheLayer,
    MegaGatedAttention,
    MegaNormalizedFeedForwardNetwork,
    build_norm,
)
from tests.parity.original import Original

MODULES = [
    "03_mega_bidir_gelu_noaffine",
    "03_mega_bidir_laplace_rotary_batchnorm_pre_chunk",
    "03_mega_bidir_laplace_simple_batchnorm_post",
    "03_mega_bidir_laplace_simple_layernorm_pre_trunc",
    "03_mega_bidir_relu2_rotary_chunk_post_layernorm",
    "03_mega_bidir_relu2_simple_rmsnorm_pre",
    "03_mega_bidir_softmax_chunk_notmultiple",
    "03_mega_bidir_softmax_rotary_scalenorm_post_chunk",
    "03_mega_bidir_softmax_short_chunk",
    "03_mega_bidir_softmax_simple_layernorm_pre",
    "04_mega_causal_laplace_rotary_rmsnorm_pre",
    "04_mega_causal_laplace_simple_chunk_post",
    "04_mega_causal_relu2_rotary_chunk_batchnorm",
    "04_mega_causal_relu2_simple_pre",
    "04_mega_causal_softmax_rotary_chunk",
    "04_mega_causal_softmax_rotary_layernorm_pre",
    "04_mega_causal_softmax_rotary_trunc",
    "04_mega_causal_softmax_simple_chunk",
    "04_mega_causal_softmax_simple_scalenorm_post",
    "15_flash_mega_bidir_laplace_simple",
]
FEED_FORWARD = ["06_nffn_post_relu_scalenorm", "06_nffn_pre_gelu_batchnorm", "06_nffn_pre_silu"]
# Names of the modules in branch `main`; branch `flash` swaps the two logits.
NAMES = {
    "gamma": "qk_weight",
    "beta": "qk_bias",
    "move.delta": "ema_gate.damping_factor",
    "move.alpha": "ema_gate.decay_factor",
    "move.beta": "ema_gate.ema_expansion_matrix",
    "move.gamma": "ema_gate.kernel_projection_matrix",
    "move.omega": "ema_gate.residual_weight",
    "rel_pos_bias.beta": "rel_pos_bias.b_param",
}
FLASH = {"move.alpha": "ema_gate.damping_factor", "move.delta": "ema_gate.decay_factor"}


class Fixture(Original):
    def name(self, key: str) -> str:
        return (NAMES | FLASH if self.flash else NAMES).get(key, key)

    def load(self, module: nn.Module) -> nn.Module:
        module.load_state_dict({self.name(key): value for key, value in self.weights().items()})
        return module.eval()


@pytest.fixture
def fixture(request, parity_folder, outputs):
    return Fixture(parity_folder("mega", request.param), outputs)


def gated_attention(fixture: Fixture, **fields) -> MegaGatedAttention:
    args, chunk = fixture.args, fixture.args.get("chunk_size", -1)
    config = MegaConfig(
        hidden_size=args["embed_dim"],
        intermediate_size=args["hdim"],
        shared_representation_size=args["zdim"],
        ema_projection_size=args["ndim"],
        bidirectional=args["bidirectional"],
        is_decoder=not args["bidirectional"],
        max_positions=args["max_positions"],
        use_chunking=chunk > 0,
        chunk_size=chunk,
        truncation=args.get("truncation"),
        normalization_type=args.get("norm_type", "layernorm"),
        normalize_before_mega=args.get("prenorm", True),
        norm_affine=args.get("norm_affine", True),
        activation=args.get("activation", "silu"),
        attention_activation=args.get("attention_activation", "softmax"),
        relative_positional_bias=args.get("rel_pos_bias", "simple"),
        ema_shift=fixture.flash and args["bidirectional"],
        padded_batch_statistics=True,
        dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **fields,
    )
    return fixture.load(MegaGatedAttention(config))


@pytest.fixture
def padding_attends(monkeypatch):
    """Attend to padding in chunks that contain nothing else, as the original does; this package returns 0 there."""
    original = window.gated_attention

    def attend(query, key, value, *, mask, chunk_size, **options):
        if mask is not None and options["function"] == "softmax":
            chunks = [mask] if chunk_size is None else mask.split(chunk_size, dim=1)
            mask = torch.cat([chunk | ~chunk.any(dim=1, keepdim=True) for chunk in chunks], dim=1)
        return original(query, key, value, mask=mask, chunk_size=chunk_size, **options)

    monkeypatch.setattr(window, "gated_attention", attend)


@pytest.mark.parametrize("fixture", MODULES, indirect=True)
def test_gated_attention(fixture, parity, padding_attends):
    layer = gated_attention(fixture)
    mask = fixture.io["padding_mask"] == 0
    parity.check(
        "rel_pos_bias", toeplitz(layer, fixture.io["rel_pos_bias"]), fixture.io["rel_pos_bias"], **fixture.tight
    )
    if "raises" in fixture.meta:  # cases in which the original raises an error must work here
        assert torch.isfinite(layer(fixture.time_major("x"), PaddedLayout(mask))[0]).all()
        return
    for padded, given in (("", None), ("_padded", mask)):
        x = fixture.time_major("x").requires_grad_()
        output, _ = layer(x, PaddedLayout(given))
        _, weights = layer(x, PaddedLayout(given), output_weights=True)
        parity.check(f"out{padded}", output.transpose(0, 1), fixture.io[f"out{padded}"], **fixture.tight)
        # Rows of weights at padding are meaningless: the model never uses them.
        keep = None if given is None else given.view(weights.shape[:-1])
        parity.check(f"attn{padded}", weights, fixture.io[f"attn{padded}"], **fixture.tight, keep=keep)
        layer.zero_grad()
        output.backward(fixture.time_major("cot"))
        parity.check(f"grad_x{padded}", x.grad.transpose(0, 1), fixture.io[f"grad_x{padded}"], **fixture.loose)
        check_gradients(fixture, parity, layer, f"grad{padded}.")


@pytest.mark.slow
@pytest.mark.parametrize("fixture", [case for case in MODULES if "trunc" not in case], indirect=True)
def test_gated_attention_by_kernels(fixture, parity, padding_attends, triton_device):
    if triton_device.type == "cuda":
        pytest.skip("the fixtures are compared on the CPU, by interpreted kernels")
    with use_backend("triton"):
        test_gated_attention(fixture, parity, padding_attends)


@torch.no_grad()
@pytest.mark.parametrize("fixture", [case for case in MODULES if "causal" in case], indirect=True)
def test_steps_and_segments(fixture, parity):
    layer, x = gated_attention(fixture), fixture.time_major("x")
    chunk = layer.config.attention_chunk
    recorded = [("step_out", 1)] + ([("segment_out", chunk), ("segment_out", 2 * chunk)] if chunk else [])
    assert {name for name, _ in recorded} == fixture.io.keys() & {"step_out", "segment_out"}
    for name, length in [*recorded, ("out", 5)]:  # the original does not support segments that end within a chunk
        past = MegaCacheLayer()
        parts = ((part, PaddedLayout(torch.ones(part.shape[:2]).bool())) for part in x.split(length, dim=1))
        outputs = [layer(part, layout, cache=past)[0] for part, layout in parts]
        # The original's steps never truncate the average; here, steps match the parallel form.
        expected = fixture.io[name if layer.ema_gate.truncation is None else "out"]
        parity.check(f"{name} by {length}", torch.cat(outputs, dim=1).transpose(0, 1), expected, **fixture.tight)


def toeplitz(layer: MegaGatedAttention, expected: torch.Tensor) -> torch.Tensor:
    """Return the matrix whose entries are the biases at the distances j - i."""
    size = expected.shape[0]
    bias = layer.rel_pos_bias(size)
    position = torch.arange(size)
    return bias[bias.shape[0] // 2 + position - position[:, None]]


def check_gradients(fixture: Fixture, parity, module: nn.Module, prefix: str):
    expected = fixture.starting_with(prefix)
    parameters = dict(module.named_parameters())
    assert {fixture.name(key) for key in expected} == parameters.keys()
    for key, value in expected.items():
        parity.check(f"{prefix}{key}", parameters[fixture.name(key)].grad, value, **fixture.loose)


@pytest.mark.parametrize(
    "fixture", [case for case in MODULES if "bidir" in case and "batchnorm" in case], indirect=True
)
def test_batch_norm_in_training(fixture, parity):
    """The statistics after a training step include padding, as configured by `padded_batch_statistics`."""
    layer = gated_attention(fixture).train()
    output, _ = layer(fixture.time_major("x"), PaddedLayout(fixture.io["padding_mask"] == 0))
    parity.check("train_out_padded", output.transpose(0, 1), fixture.io["train_out_padded"], **fixture.tight)
    for name in ("running_mean", "running_var"):
        parity.check(name, getattr(layer.norm.norm, name), fixture.io[f"train_{name}"], **fixture.tight)


@pytest.mark.parametrize("fixture", FEED_FORWARD, indirect=True)
def test_feed_forward(fixture, parity):
    args = fixture.args
    config = MegaConfig(
        hidden_size=args["embed_dim"],
        nffn_hidden_size=args["ffn_hidden_dim"],
        activation=args.get("activation", "silu"),
        normalization_type=args.get("norm_type", "layernorm"),
        normalize_before_ffn=args.get("prenorm", True),
    )
    layer = fixture.load(MegaNormalizedFeedForwardNetwork(config))
    x = fixture.time_major("x").requires_grad_()
    output = layer(x, NO_PADDING)
    parity.check("out", output.transpose(0, 1), fixture.io["out"], **fixture.tight)
    output.backward(fixture.time_major("cot"))
    parity.check("grad_x", x.grad.transpose(0, 1), fixture.io["grad_x"], **fixture.loose)
    check_gradients(fixture, parity, layer, "grad.")


@pytest.mark.parametrize("fixture", ["02_norms_and_activations"], indirect=True)
def test_norms_and_attention_functions(fixture, parity):
    for name, expected in fixture.io.items():
        if not name.startswith("out."):
            continue
        case = name.removeprefix("out.")
        norm_type, affine = case.split("_")
        norm = build_norm(norm_type, fixture.args["embedding_dim"], affine == "affine", fixture.args["eps"]).eval()
        weights = {key.split(".")[-1]: x for key, x in fixture.weights().items() if key.startswith(f"{case}.")}
        norm.load_state_dict(weights)
        parity.check(name, norm(fixture.time_major("x")).transpose(0, 1), expected, **fixture.tight)
    for function in (laplace, relu2):
        expected = fixture.io[f"act_{function.__name__}"]
        parity.check(function.__name__, function(fixture.io["act_x"]), expected, **fixture.tight)
