"""Megalodon (Ma et al. 2024, arXiv 2404.08801): Mega with a complex moving average and normalized attention.

A block normalizes its input by statistics of all positions so far, smooths it with a complex exponential moving
average, and attends within chunks with queries and keys of unit length. The average and the statistics pass information
across chunks. The residual of the feed-forward layer is the input of the block ("two-hop"). The order follows the
paper: cache, rotary positions, attention within chunks, timestep norm, moving average, gated attention, feed-forward
layer, block, model, language model, classifier.

Names and values of parameters match the published code: scales are stored as scale - 1, so that weight decay draws them
to 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn.functional import layer_norm, rms_norm, silu
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import (
    TimestepNormState,
    complex_ema,
    complex_ema_coefficients,
    complex_ema_step,
    timestep_norm,
    timestep_norm_step,
)
from luna_mega.kernels.for_models import Dropout, KeyWindow, attend, upcast
from luna_mega.modeling_common.attention import KeyValueCacheLayer, cached_backend
from luna_mega.modeling_common.base import (
    BodyMixin,
    CommonPreTrainedModel,
    StateRecorder,
    accept_past_key_values,
    exact_dtype,
    trunc_normal_,
)
from luna_mega.modeling_common.cache import StateCache, derive, keeps_derived
from luna_mega.modeling_common.generation import StateGenerationMixin
from luna_mega.modeling_common.heads import GenericForCausalLM
from luna_mega.modeling_common.inputs import Inputs, embed, prepare, scatter_states
from luna_mega.modeling_common.layout import Layout
from luna_mega.modeling_common.outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, cache_field
from luna_mega.modeling_common.pooled_heads import GenericForSequenceClassification
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig
from luna_mega.modeling_megalodon.windows_megalodon import run_in_windows, windowed_inputs

Rotation = tuple[torch.Tensor, torch.Tensor]


class MegalodonCacheLayer(KeyValueCacheLayer):
    """Recurrent state of one block for B sequences, and the rotated keys and the values of the current chunk.

    `average` `[B, D, N, 2]` has the real and imaginary parts of the moving average. `norm_count` `[B]`, `norm_mean` and
    `norm_variance` `[B, G]` are the statistics of the timestep norm. The last block also has the statistics of the
    final norm, `final_count`, `final_mean` and `final_variance`. Statistics are float64 for every dtype of the model.
    """

    average: torch.Tensor | None
    norm_mean: torch.Tensor | None

    fields = (
        "average", "keys", "values", "mask", "position", "norm_count", "norm_mean", "norm_variance", "final_count",
        "final_mean", "final_variance",
    )  # fmt: skip

    def statistics(self, norm: str) -> TimestepNormState | None:
        """Return the statistics of the norm `"norm"` or `"final"`, or None before the first position."""
        tensors = [getattr(self, f"{norm}_{name}") for name in ("count", "mean", "variance")]
        return None if tensors[0] is None else TimestepNormState(*tensors)

    def store_statistics(self, norm: str, state: TimestepNormState) -> None:
        """Replace the statistics of the norm `"norm"` or `"final"`."""
        self.store(**{f"{norm}_{name}": tensor for name, tensor in state._asdict().items()})


class MegalodonCache(StateCache):
    """Cache of a Megalodon model."""

    layer_class = MegalodonCacheLayer
    sized_by = (
        "hidden_size", "ema_projection_size", "chunk_size", "shared_representation_size", "value_size",
        "norm_num_groups",
    )  # fmt: skip


class MegalodonRotary(nn.Module):
    """Rotary position embedding: cosine and sine of the angles of every position within its chunk."""

    freqs: torch.Tensor

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        self.config = config  # of a loaded model, `chunk_size` can be changed
        width = config.shared_representation_size // config.num_attention_heads
        # Persistent: checkpoints in half precision have different frequencies.
        self.register_buffer("freqs", self.frequencies(width))

    def frequencies(self, width: int) -> torch.Tensor:
        """Return the angles per position of `width / 2` pairs of features."""
        return 1.0 / self.config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

    def forward(self, x: torch.Tensor, layout: Layout, cache: MegalodonCacheLayer | None) -> Rotation:
        """Return the two factors of `rotate`, `[2, B or 1, T, 1, z / 2 H, 2]`, for the positions of `x` after `cache`.

        The first factor is for the features of a pair, the second for the features of the pair in reverse order. Those
        of queries contain sqrt(z / H), by which the op divides scores, but normalized attention does not.
        """
        start = layout.start() if cache is None else cache.start(layout.mask)
        freqs, positions = upcast(self.freqs), layout.columns_from(start, x)
        angles = (positions % self.config.chunk_size)[..., None, None].to(freqs.dtype) * freqs
        cosine, sine = angles.cos(), angles.sin()
        root = math.sqrt(2 * len(freqs))
        first, second = torch.stack((cosine, cosine), -1), torch.stack((-sine, sine), -1)
        return torch.stack((first * root, first)), torch.stack((second * root, second))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate pairs of adjacent features of every head of queries and keys, `[2, B, T, z]`, and scale the queries."""
    cosine, sine = rotation
    pairs = upcast(x).unflatten(-1, (-1, *cosine.shape[-2:]))
    return torch.addcmul(pairs * cosine, pairs.flip(-1), sine).flatten(-3).to(x.dtype)


class MegalodonChunkAttention(nn.Module):
    """Causal attention of every head within chunks (section 3.3), counted from the first token of a sequence."""

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        self.config = config
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        self.heads = config.num_attention_heads

    def forward(
        self,
        shared: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        rotation: Rotation,
        output_weights: bool = False,
        cache: MegalodonCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `[B, T, v]`, and with `output_weights` the weights `[B, H, chunks, C, C]`.

        `shared` `[2, B, T, z]` are the queries and the keys.
        """
        query, key = rotate(shared, rotation).unbind()
        chunk = self.config.chunk_size
        if cache is None:
            window = KeyWindow(key, value, chunk, **layout.key_rows())
        else:
            window = cache.extend(key, value, layout.mask, chunk)
        options: dict[str, Any] = {"causal": True, "dropout": self.dropout.rate}
        options |= {"backend": cached_backend(self.config, cache, output_weights)}
        return attend(query, window, self.heads, return_weights=output_weights, **options)


def scale_of(norm: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return the scale of a norm of `x`, weight + 1, or None without a weight."""
    weight: Any = norm.weight
    return None if weight is None else derive(norm, "scale", x, lambda: upcast(weight) + 1.0)


class MegalodonTimestepNorm(nn.Module):
    """Norm of groups of features by the statistics of all positions so far (section 3.2).

    The `prior_*` buffers only exist in checkpoints of the published code. Its models have a `prior_count` of 0.
    """

    def __init__(self, config: MegalodonConfig, name: str = "norm"):
        super().__init__()
        self.name, self.groups, self.eps = name, config.norm_num_groups, config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.register_buffer("prior_count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("prior_mean", torch.zeros(self.groups))
        self.register_buffer("prior_logv", torch.zeros(self.groups))

    def forward(self, x: torch.Tensor, layout: Layout, cache: MegalodonCacheLayer | None = None) -> torch.Tensor:
        """Return `[B, T, d]`. With `cache`, the statistics continue from the cache, which is updated in place."""
        affine = (self.groups, scale_of(self, x), self.bias)
        if cache is None:
            result: Any = timestep_norm(x, *affine, eps=self.eps, **layout.options())
            return result
        state = cache.statistics(self.name)
        if x.shape[1] == 1:
            mask = None if layout.mask is None else layout.mask[:, 0]
            normed, state = timestep_norm_step(x[:, 0], state, *affine, eps=self.eps, mask=mask)
            normed = normed[:, None]
        else:
            options = {"initial_state": state, "return_state": True, **layout.options()}
            normed, state = timestep_norm(x, *affine, eps=self.eps, **options)
        cache.store_statistics(self.name, state)
        return normed


class MegalodonMovingAverage(nn.Module):
    """Complex exponential moving average with its skip connection (section 3.1)."""

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        width, states, dtype = config.hidden_size, config.ema_projection_size, exact_dtype()
        self.alpha = nn.Parameter(torch.empty(width, states, 1, dtype=dtype))
        self.delta = nn.Parameter(torch.empty(width, states, 1, dtype=dtype))
        self.theta = nn.Parameter(torch.empty(width, 1, 1, dtype=dtype))
        self.gamma = nn.Parameter(torch.empty(width, states, 2, dtype=dtype))
        self.omega = nn.Parameter(torch.empty(width, 1, dtype=dtype))

    def forward(self, x: torch.Tensor, layout: Layout, cache: MegalodonCacheLayer | None = None) -> torch.Tensor:
        # Typed, because `*parameters` of unknown length could also be the arguments that follow.
        parameters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
        parameters, skip = derive(self, "parameters", x, self.flat)
        if cache is None:
            result: Any = complex_ema(x, *parameters, skip, **layout.options())
            return result
        state = cache.average
        if state is not None and x.shape[1] == 1:
            coefficients = None
            if keeps_derived(x):
                compute = partial(complex_ema_coefficients, *parameters, dtype=state.dtype)
                coefficients = derive(self, "coefficients", x, compute, state.dtype)
            mask = None if layout.mask is None else layout.mask[:, 0]
            average, state = complex_ema_step(x[:, 0], state, *parameters, skip, mask=mask, coefficients=coefficients)
            average = average[:, None]
        else:
            options = {"initial_state": state, "return_state": True, "lengths": layout.lengths, **layout.options()}
            average, state = complex_ema(x, *parameters, skip, **options)
        cache.store(average=state)
        return average

    def flat(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the parameters of `complex_ema`, and the skip."""
        parameters = self.alpha.squeeze(-1), self.delta.squeeze(-1), self.theta.flatten(), self.gamma
        return parameters, self.omega.squeeze(-1)


class MegalodonRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) (weight + 1)."""

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden_size)) if config.norm_affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(upcast(x), x.shape[-1:], scale_of(self, x), self.eps).to(x.dtype)


class MegalodonGatedAttention(nn.Module):
    """Moving average, normalized attention and gate, with the residual of the layer (section 3.3)."""

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        width, shared, values = config.hidden_size, config.shared_representation_size, config.value_size
        self.heads, self.eps = config.num_attention_heads, config.norm_eps
        self.timestep_norm = MegalodonTimestepNorm(config)
        self.cema = MegalodonMovingAverage(config)
        self.rmsnorm = MegalodonRMSNorm(config)
        self.wz = nn.Linear(width, shared)
        self.wv = nn.Linear(width, values)
        self.wr = nn.Linear(width, values)
        self.wh1 = nn.Linear(width, width)
        self.wh2 = nn.Linear(values, width, bias=False)
        self.gamma = nn.Parameter(torch.empty(2, shared))
        self.beta = nn.Parameter(torch.empty(2, shared))
        self.attention = MegalodonChunkAttention(config)
        self.dropout, self.hidden_dropout = Dropout(config.dropout_prob), Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        x: torch.Tensor,
        layout: Layout,
        rotation: Rotation,
        output_weights: bool = False,
        cache: MegalodonCacheLayer | None = None,
    ) -> torch.Tensor:
        normed = self.timestep_norm(x, layout, cache)
        smoothed = self.hidden_dropout(self.rmsnorm(self.cema(normed, layout, cache)))
        shared, value, reset = self.query_and_key(smoothed), silu(self.wv(normed)), silu(self.wr(smoothed))
        attended, _ = self.attention(shared, value, layout, rotation, output_weights=output_weights, cache=cache)
        candidate = self.wh1(smoothed) + self.wh2(self.hidden_dropout(attended * reset))
        return x + self.dropout(candidate)

    def query_and_key(self, smoothed: torch.Tensor) -> torch.Tensor:
        """Return queries and keys, `[2, B, T, z]`: of unit length before the learned scale and shift of features."""
        shared = upcast(self.wz(smoothed)).unflatten(-1, (self.heads, -1))
        shared = rms_norm(shared, shared.shape[-1:], eps=self.eps).flatten(2)
        scale, shift = derive(self, "query and key", smoothed, self.scale_and_shift)
        return torch.addcmul(shift, shared, scale).to(smoothed.dtype)

    def scale_and_shift(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and the shift of queries and keys, `[2, 1, 1, z]`."""
        width = self.gamma.shape[1] // self.heads
        scale = (upcast(self.gamma) + 1.0) * width**-0.5
        return scale[:, None, None], upcast(self.beta)[:, None, None]


class MegalodonLayerNorm(nn.Module):
    """Layer norm with a scale of weight + 1."""

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden_size)) if config.norm_affine else None
        self.bias = nn.Parameter(torch.empty(config.hidden_size)) if config.norm_affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else upcast(self.bias)
        return layer_norm(upcast(x), x.shape[-1:], scale_of(self, x), bias, self.eps).to(x.dtype)


class MegalodonNormalizedFFN(nn.Module):
    """Norm and feed-forward layer. The residual is not their input."""

    def __init__(self, config: MegalodonConfig, index: int):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.index = index
        self.norm = MegalodonLayerNorm(config)
        self.fc1 = nn.Linear(width, inner, bias=False)
        self.fc2 = nn.Linear(inner, width, bias=False)
        self.fc3 = nn.Linear(width, inner, bias=False) if config.swiglu else None
        self.alpha = nn.Parameter(torch.empty(width)) if config.rescale_nffn else None
        self.dropout, self.hidden_dropout = Dropout(config.dropout_prob), Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        inner = silu(self.fc1(normed))
        inner = inner if self.fc3 is None else inner * self.fc3(normed)
        output = self.dropout(self.fc2(self.hidden_dropout(inner)))
        return residual + (output if self.alpha is None else self.alpha * output)


class MegalodonBlock(GradientCheckpointingLayer):
    """One block: gated attention, then the feed-forward layer, both added to the input of the block ("two-hop")."""

    def __init__(self, config: MegalodonConfig, index: int):
        super().__init__()
        self.mega = MegalodonGatedAttention(config)
        self.nffn = MegalodonNormalizedFFN(config, index)

    def forward(
        self,
        x: torch.Tensor,
        layout: Layout,
        rotation: Rotation,
        output_weights: bool = False,
        cache: MegalodonCacheLayer | None = None,
    ) -> torch.Tensor:
        attended = self.mega(x, layout, rotation, output_weights=output_weights, cache=cache)
        return self.nffn(attended, residual=x)


def draw_matrix(weight: torch.Tensor, initializer: str, deviation: float = 1.0) -> None:
    """Initialize a matrix with an `initializer` of the configuration; `deviation` applies to `"gaussian"`."""
    if initializer == "he":
        init.kaiming_normal_(weight, a=math.sqrt(5.0))
    elif initializer == "bert":
        init.normal_(weight, std=0.02)
    elif initializer == "gaussian":
        trunc_normal_(weight, std=deviation, a=-3.0 * deviation, b=3.0 * deviation)
    elif initializer == "xavier":
        init.xavier_uniform_(weight)
    else:
        init.kaiming_uniform_(weight, a=math.sqrt(5.0))


# Modules whose own parameters are 0 at first.
_ZERO = (
    MegalodonTimestepNorm, MegalodonRMSNorm, MegalodonLayerNorm, MegalodonGatedAttention, MegalodonNormalizedFFN,
)  # fmt: skip


class MegalodonPreTrainedModel(CommonPreTrainedModel):
    """Base class of the Megalodon models: configuration, initialization and class attributes of transformers."""

    config_class = MegalodonConfig
    config: MegalodonConfig
    base_model_prefix = "megalodon"
    cache_class = MegalodonCache
    _no_split_modules = ["MegalodonBlock"]
    # Half precision cannot represent decays near 1, nor the angles of late positions of a chunk.
    _keep_in_fp32_modules_strict = ["cema", "rope"]
    _can_record_outputs = {
        "hidden_states": StateRecorder,
        "attentions": OutputRecorder(MegalodonChunkAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            draw_matrix(module.weight, "gaussian", self.config.hidden_size**-0.5)
        elif isinstance(module, nn.Linear):
            draw_matrix(module.weight, self.config.initializer)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, MegalodonMovingAverage):
            init.normal_(module.alpha, std=0.2)
            init.normal_(module.delta, std=0.2)
            # In random order, channels have frequencies from 1 to 1 / d of the highest.
            width = len(module.theta)
            number = torch.randperm(width, device=module.theta.device) + 1
            init.copy_(module.theta, torch.logit(torch.exp(-math.log(width) / width * number)).view(-1, 1, 1))
            real = torch.randn_like(module.gamma[..., 0])
            init.copy_(module.gamma, torch.stack((real, torch.zeros_like(real)), -1))
            trunc_normal_(module.omega, std=0.25, a=-1.0, b=1.0)
        elif isinstance(module, MegalodonRotary):
            init.copy_(module.freqs, module.frequencies(2 * len(module.freqs)))
        elif isinstance(module, _ZERO):  # scales (stored as scale - 1), shifts and `prior_*`
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                init.zeros_(tensor)
            if isinstance(module, MegalodonNormalizedFFN) and module.alpha is not None:
                init.constant_(module.alpha, 0.1 * 0.5**module.index)
        else:  # a module without parameters, or of a user
            super()._init_weights(module)  # type: ignore[no-untyped-call]


@dataclass
class MegalodonModelOutput(BaseModelOutputWithPast):
    """Output of `MegalodonModel`. B sequences of T positions, H heads, attention chunks of C positions, width d.

    Args:
        last_hidden_state: `[B, T, d]`, undefined at padding.
        attention_mask: `[B, T]`, 1 = a kept position; None = all.
        cache: cache with `use_cache`.
        hidden_states: with `output_hidden_states=True`, `[B, T, d]` before and after each layer.
        attentions: with `output_attentions=True`, `[B, H, chunks, C, C]` of each layer.
    """

    attention_mask: torch.Tensor | None = None


class MegalodonModel(BodyMixin, MegalodonPreTrainedModel):
    """Megalodon without a head."""

    embedding_names = {"tokens": "embed_tokens"}

    def __init__(self, config: MegalodonConfig):
        super().__init__(config)
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.dropout = Dropout(config.dropout_prob)
        self.rope = MegalodonRotary(config)
        self.layers = nn.ModuleList(MegalodonBlock(config, index) for index in range(config.num_hidden_layers))
        self.recorder = StateRecorder()
        self.final_norm = MegalodonTimestepNorm(config, "final")
        self.gradient_checkpointing = False
        self.post_init()

    @accept_past_key_values
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        cache: MegalodonCache | None = None,
        use_cache: bool | None = None,
        **options: Unpack[TransformersKwargs],
    ) -> MegalodonModelOutput:
        """Run the model on B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens.
            attention_mask: `[B, T]`, 1 = keep, 0 = drop. None = all positions, with `input_ids` all that are not
                `pad_token_id`. Dropped positions have no effect, even between kept positions.
            inputs_embeds: `[B, T, d]` embeddings instead of tokens.
            cache: Cache of the positions before these, which is updated in place. `attention_mask` is for the
                T positions, or for these and all before them.
            use_cache: Return the cache. None = `config.use_cache`, but not in training.
            options: `output_hidden_states`, `output_attentions`, `return_dict`, and for padding-free batches
                `position_ids`, `seq_idx`, or `cu_seq_lens_q` and `max_length_q`; see `MegaModel.forward`.
                `token_type_ids` must be 0.

        Returns:
            `MegalodonModelOutput`.

        Raises:
            ValueError: Not exactly one kind of input, an empty batch, an invalid mask, or an argument that Megalodon
                does not support.
        """
        token_type_ids: Any = options.get("token_type_ids")
        inputs = prepare(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=options.get("position_ids"),
            token_type_ids=token_type_ids,
            model_cache=cache,
            use_cache=use_cache,
            options=options,
        )
        windowed = None
        if self.config.windowed_statistics and not self.training:
            windowed = windowed_inputs(self, inputs, options)
        inputs = inputs if windowed is None else windowed
        hidden_states = embed(self, inputs)
        if self.scale != 1.0:
            hidden_states = hidden_states * self.scale
        hidden_states = self.dropout(hidden_states)
        if windowed is not None:
            hidden_states = run_in_windows(self, hidden_states, inputs)
        else:
            hidden_states = self.run_layers(hidden_states, inputs, inputs.cache)
        return MegalodonModelOutput(
            last_hidden_state=scatter_states(inputs, hidden_states),
            attention_mask=None if inputs.mask is None else inputs.mask.long(),
            **cache_field(inputs.model_cache),
        )

    def run_layers(self, hidden_states: torch.Tensor, inputs: Inputs, cache: StateCache | None) -> torch.Tensor:
        """Return the states after all layers and the last norm; `cache` is updated in place."""
        layout = inputs.layout
        caches: Sequence[Any] = [None] * len(self.layers) if cache is None else cache.layers
        rotation = self.rope(hidden_states, layout, caches[0])
        recorded = layout.scatter(hidden_states) if inputs.output_states else None
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            if recorded is not None:
                hidden_states = layout.gather(recorded)
            hidden_states = layer(
                hidden_states, layout, rotation, output_weights=inputs.output_weights, cache=layer_cache
            )
            if recorded is not None:
                recorded = self.recorder(recorded, layout.scatter(hidden_states))
        return self.final_norm(hidden_states, layout, caches[-1])


MegalodonPreTrainedModel.body_class = MegalodonModel


class MegalodonForCausalLM(GenericForCausalLM, StateGenerationMixin, MegalodonPreTrainedModel):
    """Megalodon with a language-modeling head. Generation uses constant memory, because attention is in chunks."""

    _tied_weights_keys = {"lm_head.weight": "megalodon.embed_tokens.weight"}
    output_class = CausalLMOutputWithPast

    def make_head(self, config: MegalodonConfig) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.scores, bias=False)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary. Raises `NotImplementedError` if `output_size` differs from `vocab_size`."""
        if self.config.scores != self.config.vocab_size:
            raise NotImplementedError(
                f"a vocabulary of {self.config.vocab_size} tokens with output_size={self.config.output_size} scores "
                "cannot be resized, as the token of each score is not known; build a model with the new sizes"
            )
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.config.output_size is not None:
            self.config.output_size = self.config.vocab_size
        return embeddings

    @accept_past_key_values
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        cache: MegalodonCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Predict the next tokens from the inputs of `MegalodonModel.forward`.

        `labels` `[B, T]` are token ids, usually `input_ids`; the loss shifts them and ignores -100. The keyword
        argument `shift_labels` `[B, T]` replaces them: the token that follows each position, including the last.
        `logits` are `[B, T, output_size]`, restricted to the last `logits_to_keep` positions or to the positions in
        `logits_to_keep` if it is a tensor.

        Raises:
            ValueError: As in `MegalodonModel.forward`, and if labels do not match the positions of `logits_to_keep`.
        """
        return self.predict_next(
            labels,
            logits_to_keep,
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
        )


class MegalodonForSequenceClassification(GenericForSequenceClassification, MegalodonPreTrainedModel):
    """Megalodon with a sequence classification or regression head on the pooled states (`config.pooling`)."""

    output_class = SequenceClassifierOutput


__all__ = [
    "MegalodonCache",
    "MegalodonForCausalLM",
    "MegalodonForSequenceClassification",
    "MegalodonModel",
    "MegalodonPreTrainedModel",
]
