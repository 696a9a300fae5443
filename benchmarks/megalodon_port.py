"""Megalodon as the PyTorch port pszemraj/megalodon-hf (January 2026) computes it, on the weights of our model.

It restates the operations of the port in its order, without checks, masks and dropout: powers of q in memory, 4,096 at
a time, and an FFT; sums over time for the norm; `scaled_dot_product_attention` in chunks; and with a cache one position
after the other, also in a prompt. In two places the port computes something else than the original, and the baseline
what the original does, so that results can be compared: the port rotates other pairs of features, and leaves the
variance within a group out of the norm.
"""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention, silu
from transformers.modeling_outputs import CausalLMOutputWithPast

from luna_mega import MegalodonForCausalLM
from luna_mega.modeling_megalodon.attention_megalodon import widen
from luna_mega.modeling_megalodon.modeling_megalodon import (
    MegalodonBlock,
    MegalodonMovingAverage,
    MegalodonRotary,
    MegalodonTimestepNorm,
)

POWERS = 4096


class PortCache:
    """What the port keeps between calls: for every block, and the norm behind the last, tensors by name."""

    def __init__(self, blocks: int):
        self.layers, self.position = [{} for _ in range(blocks + 1)], 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    def reorder_cache(self, order: torch.Tensor) -> None:
        self.layers = [{name: x.index_select(0, order) for name, x in layer.items()} for layer in self.layers]


class MegalodonPort(nn.Module):
    """A language model with the weights and the call of ours, and the operations of the port."""

    def __init__(self, model: MegalodonForCausalLM):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, labels=None, past_key_values=None, use_cache=False, logits_to_keep=0):
        body, past = self.model.megalodon, past_key_values
        if past is None and use_cache:
            past = PortCache(len(body.layers))
        memory, start = ([None] * (len(body.layers) + 1), 0) if past is None else (past.layers, past.position)
        states = body.embed_tokens(input_ids) * body.scale
        for layer, own in zip(body.layers, memory[:-1], strict=True):
            states = port_block(layer, body.rope, states, start, own)
        states = timestep_norm(body.final_norm, states, memory[-1])
        if past is not None:
            past.position += input_ids.shape[1]
        logits, loss = self.model.lm_head(states[:, -logits_to_keep:]), None
        if labels is not None:
            shifted = logits[:, :-1].contiguous()
            loss = cross_entropy(shifted.flatten(0, 1), labels[:, 1:].contiguous().flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)


def port_block(
    layer: MegalodonBlock, rope: MegalodonRotary, x: torch.Tensor, start: int = 0, past: dict | None = None
) -> torch.Tensor:
    """Compute one block on `[B, T, d]`, which begins at position `start`; `past` is brought up to date."""
    mega = layer.mega
    normed = timestep_norm(mega.timestep_norm, x, past)
    signal = normed.transpose(1, 2)
    average = convolve(mega.cema, signal) if past is None else recur(mega.cema, signal, past)
    average = (average + signal * mega.cema.omega).transpose(1, 2)
    smoothed = unit(average, mega.eps) * (mega.rmsnorm.weight + 1.0)
    shared = unit(mega.wz(smoothed).unflatten(-1, (mega.heads, -1)), mega.eps)
    scale, shift = (row.view(2, 1, 1, mega.heads, -1) for row in (mega.gamma + 1.0, mega.beta))
    query, key = (shared * (scale / math.sqrt(shared.shape[-1])) + shift).flatten(3).unbind()
    value, reset = silu(mega.wv(normed)), silu(mega.wr(smoothed))
    query, key = turn(rope, query, start), turn(rope, key, start)
    heads = (tensor.unflatten(-1, (mega.heads, -1)) for tensor in (query, key, value))
    chunk = mega.attention.chunk_size
    attended = attend(*heads, chunk) if past is None else attend_with_cache(*heads, chunk, start, past)
    y = x + (mega.wh1(smoothed) + mega.wh2(attended * reset))
    return layer.nffn(y, residual=x)


def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * x.pow(2).mean(-1, keepdim=True).add(eps).rsqrt()


def turn(rope: MegalodonRotary, x: torch.Tensor, start: int) -> torch.Tensor:
    freqs = widen(rope.freqs)
    position = torch.arange(start, start + x.shape[1], dtype=freqs.dtype)
    angles = (position[:, None] * freqs)[None, :, None]
    even, odd = widen(x).unflatten(-1, (-1, angles.shape[-1], 2)).unbind(-1)
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(2).to(x.dtype)


def timestep_norm(norm: MegalodonTimestepNorm, x: torch.Tensor, past: dict | None) -> torch.Tensor:
    """Compute the norm by sums over time."""
    rows = widen(x).unflatten(2, (norm.groups, -1))
    own = rows.mean(-1)
    spread = rows.square().mean(-1) - own.square()
    zeros = rows.new_zeros(len(x), norm.groups)
    if past:
        count, mean, variance = past["count"], past["mean"], past["variance"]
    else:
        count, mean, variance = zeros[:, :1], zeros, zeros
    number = (count + torch.arange(1, x.shape[1] + 1, dtype=rows.dtype))[..., None]
    means = ((mean * count)[:, None] + own.cumsum(1)) / number
    before = torch.cat((mean[:, None], means[:, :-1]), 1)
    around = (own - before) * (own - means) + spread
    variances = ((variance * count)[:, None] + around.cumsum(1)) / number
    if past is not None:
        past |= {"count": number[:, -1], "mean": means[:, -1], "variance": variances[:, -1]}
    y = (rows - means[..., None]) * torch.rsqrt(variances.clamp_min(1e-6)[..., None] + norm.eps)
    scale, shift = (row.view(norm.groups, -1) for row in (norm.weight + 1.0, norm.bias))
    return (y * scale + shift).flatten(2).to(x.dtype)


def coefficients(average: MegalodonMovingAverage) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return p, q and gamma, `[d, N]`; the last two are complex."""
    p, states = torch.sigmoid(widen(average.alpha[..., 0])), average.alpha.shape[1]
    number = torch.arange(1, states + 1, dtype=p.dtype)
    phase = torch.sigmoid(widen(average.theta[..., 0])) * (2 * math.pi / states) * number
    q = torch.polar(1.0 - p * torch.sigmoid(widen(average.delta[..., 0])), phase)
    return p, q, torch.view_as_complex(widen(average.gamma)) * math.sqrt(1 / states)


def convolve(average: MegalodonMovingAverage, x: torch.Tensor) -> torch.Tensor:
    """Average `[B, d, T]` by FFT."""
    p, q, gamma = coefficients(average)
    length, weight = x.shape[2], gamma * p
    radius, angle = q.abs().clamp(max=1.0)[..., None], q.angle()[..., None]
    kernel = q.new_empty(len(q), length)
    for start in range(0, length, POWERS):
        lags = torch.arange(start, min(start + POWERS, length))
        powers = torch.pow(radius, lags).to(q.dtype) * torch.exp(1j * angle * lags.to(p.dtype))
        kernel[:, start : start + POWERS] = (weight[..., None] * powers).sum(1)
    size = 1 << (2 * length - 1).bit_length()
    product = torch.fft.rfft(widen(x), n=size) * torch.fft.rfft(kernel.real, n=size)
    return torch.fft.irfft(product, n=size)[..., :length].to(x.dtype)


def recur(average: MegalodonMovingAverage, x: torch.Tensor, past: dict) -> torch.Tensor:
    """Average `[B, d, T]` one position after the other."""
    p, q, gamma = coefficients(average)
    state, signal, output = past.get("average", q.new_zeros(len(x), *q.shape)), x.to(q.dtype), torch.empty_like(x)
    for t in range(x.shape[2]):
        state = q * state + p * signal[:, :, t, None]
        output[:, :, t] = (state.real * gamma.real - state.imag * gamma.imag).sum(-1)
    past["average"] = state
    return output


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: int) -> torch.Tensor:
    """Attend within chunks of `[B, T, H, K]`."""
    length = query.shape[1]
    chunk = min(chunk, length)
    parts = (pad(x, (0, 0, 0, 0, 0, -length % chunk)).unflatten(1, (-1, chunk)) for x in (query, key, value))
    parts = (x.flatten(0, 1).transpose(1, 2) for x in parts)
    attended = scaled_dot_product_attention(*parts, is_causal=True, scale=1.0)
    return attended.transpose(1, 2).reshape(len(query), -1, value[0, 0].numel())[:, :length]


def attend_with_cache(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: int, start: int, past: dict
) -> torch.Tensor:
    """Attend to the keys and values of the open chunk, which are copied at every call."""
    outputs, done, length = [], 0, query.shape[1]
    while done < length:
        held = (start + done) % chunk
        part = slice(done, done + min(length - done, chunk - held))
        kept = {"keys": key[:, part], "values": value[:, part]}
        if held:
            kept = {name: torch.cat((past[name], x), 1) for name, x in kept.items()}
        past |= kept
        rows = [x.transpose(1, 2) for x in (query[:, part], *kept.values())]
        mask = None
        if held:
            columns = torch.arange(kept["keys"].shape[1])
            sees = columns <= columns[held:, None]
            mask = torch.where(sees, torch.zeros_like(sees, dtype=query.dtype), float("-inf"))
        attended = scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=mask is None, scale=1.0)
        outputs.append(attended.transpose(1, 2).flatten(2))
        done = part.stop
    return torch.cat(outputs, 1)
