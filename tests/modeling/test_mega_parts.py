"""Mega's norms and relative biases, compared with PyTorch and formulas. Synchronization is in `tests/distributed`."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from luna_mega import MegaConfig
from luna_mega.modeling_mega.modeling_mega import MegaRotaryRelativeBias, MegaSimpleRelativeBias, build_norm
from tests.modeling import mega
from tests.modeling.luna import tokens

NORMS = ("layernorm", "scalenorm", "rmsnorm", "batchnorm", "syncbatchnorm")


def make_norm(norm_type, width=5, **options):
    """Return a norm whose parameters and running statistics affect the result."""
    norm = build_norm(norm_type, width, **options)
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return norm


@pytest.mark.parametrize("norm_type", NORMS)
def test_half_precision(norm_type):
    """Norms are accurate although squares of 1000, and sums of 4096 such numbers, exceed the range of float16."""
    x = 1000.0 + 100.0 * torch.randn(2, 2048, 5)
    norm = make_norm(norm_type)
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        rounded = x.to(dtype)
        expected = norm(rounded.float())
        copy = build_norm(norm_type, 5).to(dtype)
        copy.load_state_dict(norm.state_dict())
        actual = copy(rounded.requires_grad_())
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
        actual.float().square().sum().backward()
        assert torch.isfinite(rounded.grad).all()


def test_legacy_rms_norm():
    x = torch.randn(2, 7, 5)
    norm = make_norm("rmsnorm", legacy_rms_norm=True)
    assert torch.equal(norm(x), x * norm.weight)
    assert torch.equal(build_norm("rmsnorm", 5, affine=False, legacy_rms_norm=True)(x), x)


@pytest.mark.parametrize("norm_type", ("batchnorm", "syncbatchnorm"))
def test_batch_norm_equals_pytorch(norm_type):
    x = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    norm = make_norm(norm_type).double()
    plain = nn.BatchNorm1d(5).double()
    plain.load_state_dict(norm.state_dict())
    weight = torch.randn_like(x)
    for _ in range(2):
        actual, expected = norm(x), plain(x.flatten(0, 1)).view_as(x)
        torch.testing.assert_close(actual, expected)
        for a, b in zip(
            torch.autograd.grad(actual, (x, *norm.parameters()), weight),
            torch.autograd.grad(expected, (x, *plain.parameters()), weight),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    assert not norm.running_mean.requires_grad and not norm.running_var.requires_grad


def test_batch_statistics_of_real_tokens():
    x, mask = torch.randn(2, 9, 5, dtype=torch.float64), torch.arange(9) < torch.tensor([[9], [4]])
    norm, packed = make_norm("batchnorm").double(), make_norm("batchnorm").double()
    packed.load_state_dict(norm.state_dict())
    actual = norm(x, mask)
    torch.testing.assert_close(actual[mask], packed(x[mask][None])[0])
    torch.testing.assert_close(norm.state_dict(), packed.state_dict())
    padded = make_norm("batchnorm", padded_statistics=True).double()
    complete = make_norm("batchnorm").double()
    complete.load_state_dict(padded.state_dict())
    torch.testing.assert_close(padded(x, mask), complete(x))
    assert (actual - padded(x, mask)).abs().max() > 1e-2


def test_batch_of_padding_and_batch_of_one():
    norm = make_norm("batchnorm")
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    assert torch.isfinite(norm(torch.randn(1, 3, 5), torch.zeros(1, 3, dtype=torch.bool))).all()
    assert torch.equal(norm.running_mean, before["running_mean"])
    assert torch.equal(norm.running_var, before["running_var"])
    assert torch.isfinite(norm(torch.randn(1, 1, 5))).all()
    assert torch.isfinite(norm.running_var).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_a_step_once(reentrant):
    norm, plain = make_norm("batchnorm"), make_norm("batchnorm")
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(2, 4, 5, requires_grad=True)
    checkpoint(norm, x, use_reentrant=reentrant).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)


def test_simple_bias():
    bias = MegaSimpleRelativeBias(6)
    nn.init.normal_(bias.rel_pos_bias)
    table = bias.rel_pos_bias.detach()
    assert torch.equal(bias(6), table) and torch.equal(bias(2), table[4:7])
    shifted = MegaSimpleRelativeBias(6, center=3)
    shifted.load_state_dict(bias.state_dict())
    assert torch.equal(shifted(3), table[1:6])
    with pytest.raises(ValueError, match="11 entries.* at most 6 positions, got 7"):
        bias(7)
    with pytest.raises(ValueError, match="entry 3, supports at most 4 positions, got 5"):
        shifted(5)
    assert bias.bfloat16()(4).dtype == torch.float32
    assert list(bias.state_dict()) == ["rel_pos_bias"]


def test_rotary_bias():
    """The bias at each distance is the product of the two rotated vectors."""
    bias = MegaRotaryRelativeBias(8).double()
    for parameter in bias.parameters():
        nn.init.normal_(parameter)
    frequency = torch.exp(torch.arange(4, dtype=torch.float64) * -(math.log(10000.0) / 4))
    angle = torch.arange(9, dtype=torch.float64)[:, None] * frequency

    def rotate(vector):
        first, second = vector.expand(9, 8).chunk(2, dim=1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)

    matrix = rotate(bias.alpha) @ rotate(bias.b_param).T
    vector = bias(9)
    for i in range(9):
        torch.testing.assert_close(vector[8 - i : 17 - i], matrix[i])
    torch.testing.assert_close(bias(4), vector[5:12])
    assert sorted(bias.state_dict()) == ["alpha", "b_param"]
    assert bias.half()(5).dtype == torch.float32
    with pytest.raises(ValueError, match="even width, got 7"):
        MegaRotaryRelativeBias(7)


def test_a_decoder_has_one_direction(tmp_path):
    """`is_decoder` determines `bidirectional`; loading an encoder with inconsistent values raises an error."""
    for decoder in (True, False):
        config = mega.tiny_config(is_decoder=decoder)
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["bidirectional"]
        assert config.bidirectional is saved is MegaConfig.from_pretrained(tmp_path).bidirectional is not decoder
    with pytest.raises(Exception, match="is_decoder=True requires bidirectional=False"):
        MegaConfig.from_pretrained(tmp_path, is_decoder=True)
    assert MegaConfig.from_pretrained(tmp_path, is_decoder=True, bidirectional=False).is_decoder


def test_odd_widths_and_lengths_of_the_bias_table():
    """The simple bias supports odd widths; its table limits the length, and the legacy table the chunk size."""
    model = mega.make("Model", shared_representation_size=13, relative_positional_bias="simple")
    assert torch.isfinite(model(**tokens([9, 4])).last_hidden_state).all()
    model = mega.make("Model", relative_positional_bias="simple", legacy_bias_table=True, chunk_size=24)
    assert torch.isfinite(model(**tokens([24])).last_hidden_state).all()
    with pytest.raises(ValueError, match="24 positions, got 25"):
        model(**tokens([25]))
    for fields in ({}, {"relative_positional_bias": "simple", "use_chunking": True, "chunk_size": 24}):
        mega.make("Model", **fields)(**tokens([49]))


def test_chunk_size_of_a_loaded_model_can_be_changed():
    """As in the evaluation of the language models, with longer chunks than in training."""
    fields = {"is_decoder": True, "bidirectional": False, "use_chunking": True, "relative_positional_bias": "rotary"}
    model, expected = (mega.make("Model", chunk_size=chunk, **fields).eval() for chunk in (4, 8))
    expected.load_state_dict(model.state_dict())
    inputs = tokens([19, 19])
    before = model(**inputs)[0]
    model.config.chunk_size = 8
    after = model(**inputs)[0]
    torch.testing.assert_close(after, expected(**inputs)[0])
    assert not torch.allclose(after, before)
