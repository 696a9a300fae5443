"""Baselines of the ops: the operations of the original code in the original order, and PyTorch's own kernels."""

import math
from functools import cache
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from luna_mega.kernels.api import damped_ema, use_backend
from luna_mega.kernels.gated_attention.reference import weights
from luna_mega.kernels.luna_attention import torch_backend as attention_backend
from luna_mega.kernels.recurrence import torch_backend as ema_backend


def original_luna_attention(query, pack_query, key, value, project, *, context_mask=None):
    """Compute `luna_attention` as fairseq-apollo's `LunarMultiheadAttention` does, with the weights in memory."""
    packed = _attend(pack_query, key, value, context_mask, upcast=False)
    return _attend(query, *project(packed), None, upcast=True), packed


def _attend(query, key, value, mask, upcast):
    batch, length, heads, size = query.shape
    query, key, value = (x.transpose(1, 2).reshape(batch * heads, -1, size) for x in (query * size**-0.5, key, value))
    scores = torch.bmm(query, key.transpose(1, 2))
    if mask is not None:
        scores = scores.view(batch, heads, length, -1).masked_fill(~mask[:, None, None], float("-inf"))
        scores = scores.view(batch * heads, length, -1)
    dtype = torch.promote_types(scores.dtype, torch.float32) if upcast else None
    weights = torch.softmax(scores, dim=-1, dtype=dtype).to(value.dtype)
    return torch.bmm(weights, value).view(batch, heads, length, size).transpose(1, 2)


def sdpa_luna_attention(backend, query, pack_query, key, value, project, *, context_mask=None):
    """Compute `luna_attention` with one kernel of PyTorch's SDPA, which may not support the mask."""
    with sdpa_kernel(backend):
        packed = attention_backend.sdpa(pack_query, key, value, context_mask, query.shape[-1] ** -0.5, 0.0)
        return attention_backend.sdpa(query, *project(packed), None, query.shape[-1] ** -0.5, 0.0), packed


def original_luna_causal_attention(query, pack_query, pack_key, key, value):
    """Compute `luna_causal_attention` as fairseq-apollo's `LunarCausalAttention` does in training (its parallel form).

    The sums up to every token are in memory.
    """
    batch, length, heads, size = query.shape
    tensors = (query * size**-0.5, pack_query * size**-0.5, pack_key, key, value)
    query, pack_query, pack_key, key, value = (x.transpose(1, 2).reshape(batch * heads, -1, size) for x in tensors)
    packed = nn.functional.softplus(torch.bmm(pack_key, pack_query.transpose(1, 2)), beta=math.log(2.0))
    scores = _prefix_products(query, key, packed)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    output = _prefix_products(weights, packed, value)
    return output.view(batch, heads, length, size).transpose(1, 2)


def _prefix_products(x, y, z):
    sums = torch.matmul(y.unsqueeze(3), z.unsqueeze(2)).cumsum(dim=1)
    positions = torch.arange(1, x.shape[1] + 1, device=x.device)
    return torch.matmul(x.unsqueeze(2), sums).squeeze(2) / positions[None, :, None]


def original_damped_ema(x, input_logit, damping_logit, expansion, projection, skip):
    """Compute `damped_ema` as facebookresearch/mega's `MultiHeadEMA` does, with all powers of q in memory."""
    length = x.shape[1]
    p = torch.sigmoid(input_logit)[..., None]
    q = 1.0 - p * torch.sigmoid(damping_logit)[..., None]
    powers = torch.exp(torch.arange(length, dtype=x.dtype, device=x.device) * torch.log(q))
    kernel = torch.einsum("rnl,rn->rl", p * expansion[..., None] * powers, projection / math.sqrt(projection.shape[1]))
    signal, size, start = x.transpose(1, 2), length, 0
    if len(kernel) == 2 * x.shape[2]:
        forward, backward = kernel.chunk(2)
        kernel = nn.functional.pad(forward, (length - 1, 0)) + nn.functional.pad(backward.flip(-1), (0, length - 1))
        signal, size, start = nn.functional.pad(signal, (length - 1, 0)), 2 * length - 1, 2 * length - 2
    product = torch.fft.rfft(signal, n=2 * size) * torch.fft.rfft(kernel, n=2 * size)
    average = torch.fft.irfft(product, n=2 * size)[..., start : start + length]
    return nn.functional.silu(average.transpose(1, 2) + x * skip)


@cache
def _mega_of_transformers(channels, states, directions):
    from transformers.models.deprecated.mega.modeling_mega import MegaConfig, MegaMultiDimensionDampedEma

    config = MegaConfig(hidden_size=channels, ema_projection_size=states, bidirectional=directions == 2)
    return MegaMultiDimensionDampedEma(config)


def transformers_damped_ema(x, input_logit, damping_logit, expansion, projection, skip):
    """Compute `damped_ema` with Mega's module of transformers 4.46, if this version is installed."""
    channels, states = x.shape[2], projection.shape[1]
    module = _mega_of_transformers(channels, states, len(projection) // channels)
    logits = {"damping_factor": input_logit, "decay_factor": damping_logit, "ema_expansion_matrix": expansion}
    parameters = {name: tensor[..., None] for name, tensor in logits.items()}
    parameters |= {"kernel_projection_matrix": projection, "residual_weight": skip}
    return torch.func.functional_call(module, parameters, (x.transpose(0, 1),))[0].transpose(0, 1)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


def copy(x, *parameters, **options):
    """Return a copy of x, and in the backward pass of the gradient: the least that an op reads and writes."""
    return _Copy.apply(x)


def original_complex_ema(x, input_logit, damping_logit, phase_logit, projection, skip):
    """Compute `complex_ema` as XuezheMax/megalodon does: all N L powers of q in memory, and the next power of two."""
    length, states = x.shape[1], input_logit.shape[1]
    p = torch.sigmoid(input_logit)
    number = torch.arange(1, states + 1, dtype=x.dtype, device=x.device)
    phase = torch.sigmoid(phase_logit)[:, None] * (2 * math.pi / states) * number
    log_q = torch.log(torch.polar(1.0 - p * torch.sigmoid(damping_logit), phase))
    powers = torch.exp(log_q[..., None] * torch.arange(length, dtype=x.dtype, device=x.device))
    gamma = torch.view_as_complex(projection) * math.sqrt(1 / states)
    kernel = torch.einsum("dn,dnl->dl", p * gamma, powers).real
    size = 2 << (length - 1).bit_length()
    signal = x.transpose(1, 2)
    product = torch.fft.rfft(signal, n=size) * torch.fft.rfft(kernel, n=size)
    average = torch.fft.irfft(product, n=size)[..., :length]
    return (average + skip[:, None] * signal).transpose(1, 2)


def s4d(x, log_decay, phase, weight, skip):
    """Compute `diagonal_ssm` by S4D's formula: all N L powers of q in memory, and an FFT of 2 L positions."""
    length = x.shape[1]
    log_q = log_decay if phase is None else torch.complex(log_decay, phase)
    powers = torch.exp(log_q[..., None] * torch.arange(length, device=x.device))
    kernel = torch.einsum("dn,dnl->dl", _numbers(log_decay, phase, weight)[1], powers).real
    product = torch.fft.rfft(x.mT, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
    return torch.fft.irfft(product, n=2 * length)[..., :length].mT + skip * x


def loop_diagonal_ssm(x, log_decay, phase, weight, skip):
    """Compute `diagonal_ssm` one position at a time, in plain PyTorch; phase None = real states."""
    q, c = _numbers(log_decay, phase, weight)
    state, outputs = torch.zeros_like(q), []
    for value in x.unbind(1):
        state = q * state + value[..., None]
        outputs.append((c * state).real.sum(-1) + skip * value)
    return torch.stack(outputs, 1)


def scan_diagonal_ssm(x, log_decay, phase, weight, skip):
    """Compute `diagonal_ssm` with PyTorch's associative scan, with all states in memory."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    q, c = _numbers(log_decay, phase, weight)
    values = x[..., None].expand(*x.shape, q.shape[1]).to(q.dtype)
    states = associative_scan(combine, (q.expand_as(values).contiguous(), values), 1, combine_mode="generic")[1]
    return (c * states).real.sum(-1) + skip * x


def lfilter_ssm(x, log_decay, phase, weight, skip):
    """Compute `diagonal_ssm` with real states by one `scipy.signal.lfilter` per state, with gradients."""
    if phase is not None:
        raise ValueError("real states only")
    return _Filters.apply(x, log_decay.exp(), weight) + skip * x


class _Filters(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q, weight):
        ctx.save_for_backward(x, q, weight)
        output = torch.empty_like(x)
        for d, filters in _filters(x, q):
            output[..., d] = sum(w * h for w, h in zip(weight[d], filters, strict=True))
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, q, weight = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (x, q, weight)]
        reversed_ = _filters(gradient.flip(1), q)
        for (d, states), (_, received) in zip(_filters(x, q), reversed_, strict=True):
            received = [w * r.flip(1) for w, r in zip(weight[d], received, strict=True)]
            grads[0][..., d] = sum(received)
            pairs = zip(received, states, strict=True)
            grads[1][d] = torch.stack([(r[:, 1:] * h[:, :-1]).sum() for r, h in pairs])
            grads[2][d] = torch.stack([(gradient[..., d] * h).sum() for h in states])
        return tuple(grads)


def _filters(x, q):
    """Yield every channel and its signal `[B, T]` filtered by each state."""
    from scipy.signal import lfilter

    one = np.ones(1, np.float32)
    for d, row in enumerate(q.detach().numpy()):
        signal = np.ascontiguousarray(x[..., d].detach().numpy())
        yield d, [torch.from_numpy(lfilter(one, np.array([1.0, -a], np.float32), signal)) for a in row]


def _numbers(log_decay, phase, weight):
    if phase is None:
        return log_decay.exp(), weight
    return torch.polar(log_decay.exp(), phase), torch.view_as_complex(weight)


def fft_damped_ema(*arguments):
    """Compute `damped_ema` by FFT (cuFFT on a GPU) at every length, without the powers of q in memory."""
    with use_backend("torch"), mock.patch.object(ema_backend, "MANY_POSITIONS", 2**62):
        return damped_ema(*arguments)


def original_gated_attention(query, key, value, bias, *, function, causal, chunk_size):
    """Compute `gated_attention` with the weights in memory, for lengths that are multiples of the chunk."""
    chunk = chunk_size or query.shape[1]
    query, key, value = (x.unflatten(1, (-1, chunk)) for x in (query, key, value))
    return (weights(query, key, bias, None, function, causal).to(value.dtype) @ value).flatten(1, 2)
