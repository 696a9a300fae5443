"""Mega: Moving Average Equipped Gated Attention (Ma et al. 2022, arXiv 2209.10655).

A block smooths its input with a multi-dimensional damped moving average, applies single-head attention to the smoothed
sequence, and gates the result into the residual. Attention may be restricted to chunks; then only the moving average
passes information across chunks. Order of this file: caches, norms, dropout, relative biases, embeddings, moving
average, gated attention, cross-attention, feed-forward layer, block, model, heads, language models, translation.

Modules and parameters have the same names as Mega in transformers v4, so that its checkpoints can be loaded. Two of
them swap the paper's names: `damping_factor` contains the logits of alpha (weight of the input), `decay_factor` the
logits of delta (damping).

Shapes: B sequences of T positions, S positions of a source, C positions of a chunk. Sizes: d = `hidden_size`,
Z = `shared_representation_size`, V = `intermediate_size`, N = `ema_projection_size`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers import GenerationConfig, initialization as init
from transformers.activations import ACT2FN
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import TruncatedEmaState, damped_ema, damped_ema_step, ema_coefficients, gated_attention
from luna_mega.kernels.for_models import (
    COMPILED,
    EXPORTED,
    Dropout,
    KeyWindow,
    attend,
    is_capturing,
    is_plain,
    mode,
    upcast,
)
from luna_mega.modeling_common.attention import KeyValueCacheLayer, cached_backend
from luna_mega.modeling_common.base import (
    BodyMixin,
    CommonPreTrainedModel,
    StateRecorder,
    accept_past_key_values,
    clear_row,
    exact_dtype,
    make_embedding,
    trunc_normal_,
)
from luna_mega.modeling_common.cache import (
    StateCache,
    StateLayer,
    StateSeq2SeqCache,
    derive,
    keeps_derived,
    layer_caches,
)
from luna_mega.modeling_common.generation import Seq2SeqGenerationMixin, StateGenerationMixin
from luna_mega.modeling_common.heads import (
    GenericForCausalLM,
    GenericForMaskedLM,
    GenericForQuestionAnswering,
    GenericForTokenClassification,
    checked_loss,
)
from luna_mega.modeling_common.inputs import ValueEmbeddings, embed, prepare, scatter_states
from luna_mega.modeling_common.labels import check_pooled_labels
from luna_mega.modeling_common.layout import NO_PADDING, Layout, PaddedLayout
from luna_mega.modeling_common.masks import blank_token
from luna_mega.modeling_common.outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    Seq2SeqLMOutput,
    cache_field,
)
from luna_mega.modeling_common.pooled_heads import (
    ClassificationHead,
    GenericForMultipleChoice,
    GenericForSequenceClassification,
    GenericForSequencePairClassification,
    PooledHead,
    first_token,
)
from luna_mega.modeling_common.seq2seq import Seq2SeqBody, Seq2SeqLM
from luna_mega.modeling_mega.adaptive import MegaAdaptiveEmbedding, MegaAdaptiveSoftmax, MegaBandProjection
from luna_mega.modeling_mega.batch_norm_mega import MegaBatchNorm
from luna_mega.modeling_mega.configuration_mega import MegaConfig, MegaSeq2SeqConfig, check_tied_widths
from luna_mega.modeling_mega.patches_mega import PatchEmbeddings, interpolate_positions, interpolate_raster_bias


class MegaCacheLayer(KeyValueCacheLayer):
    """Recurrent state of one block: the states of the moving average, and the fields of `KeyValueCacheLayer`.

    `average` `[B, d, N]` contains the states after all inputs. With `config.truncation`, `inputs` `[B, truncation, d]`
    contains the last inputs, and `forgotten` `[B, d, N]` the states before the last inputs.
    """

    average: torch.Tensor | None
    inputs: torch.Tensor
    forgotten: torch.Tensor
    keys: torch.Tensor

    fields = ("average", "keys", "values", "mask", "position", "inputs", "forgotten")


class MegaCrossCacheLayer(StateLayer):
    """Source of the cross-attention of one block: `keys` `[B, S, Z]`, `values` `[B, S, d]`, `mask` `[B, S]` or None."""

    keys: torch.Tensor  # None before the source is stored
    values: torch.Tensor
    mask: torch.Tensor | None

    fields = ("keys", "values", "mask")

    def get_seq_length(self) -> int:
        """Return S, or 0 before the source is stored."""
        return 0 if self.keys is None else self.keys.shape[1]


class MegaCache(StateCache):
    """Cache of a Mega decoder without cross-attention."""

    layer_class = MegaCacheLayer
    sized_by = (
        "hidden_size", "ema_projection_size", "attention_chunk", "shared_representation_size", "intermediate_size",
        "truncation",
    )  # fmt: skip


class MegaCrossCache(StateCache):
    """Cache of the source of a Mega decoder with cross-attention."""

    layer_class = MegaCrossCacheLayer
    sized_by = ("hidden_size", "shared_representation_size")


class MegaSeq2SeqCache(StateSeq2SeqCache):
    """Cache of a Mega decoder with cross-attention: a `MegaCache` and a `MegaCrossCache`."""

    self_attention_class, cross_attention_class = MegaCache, MegaCrossCache


class MegaScaleNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times one learned number (`scalar`, `[1]`)."""

    def __init__(self, width: int, eps: float, affine: bool):
        super().__init__()
        self.width, self.eps = width, eps
        self.scalar = nn.Parameter(torch.ones(1)) if affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x, (self.width,), eps=self.eps)
        return normed if self.scalar is None else (normed * self.scalar).to(x.dtype)


class MegaRMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight.

    With `legacy`, only x * weight: Mega in transformers v4 does not normalize, and its checkpoints depend on that.
    """

    def __init__(self, width: int, eps: float, affine: bool, legacy: bool):
        super().__init__(width, eps=eps, elementwise_affine=affine)
        self.legacy = legacy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.legacy:
            return super().forward(x)
        return x if self.weight is None else (x * self.weight).to(x.dtype)


def build_norm(
    norm_type: str,
    width: int,
    affine: bool = True,
    eps: float = 1e-5,
    *,
    padded_statistics: bool = False,
    legacy_rms_norm: bool = False,
) -> nn.Module:
    """Return a norm of `[B, T, width]`; `norm_type` is a `normalization_type` of `MegaConfig`.

    Batch norms also accept a mask `[B, T]`; with `padded_statistics`, their statistics include padding. With
    `legacy_rms_norm`, the RMS norm only multiplies by its weight.
    """
    if norm_type == "layernorm":
        return nn.LayerNorm(width, eps=eps, elementwise_affine=affine)
    if norm_type == "scalenorm":
        return MegaScaleNorm(width, eps, affine)
    if norm_type == "rmsnorm":
        return MegaRMSNorm(width, eps, affine, legacy_rms_norm)
    return MegaBatchNorm(width, eps, affine, padded_statistics, synchronized=norm_type == "syncbatchnorm")


class MegaSequenceNorm(nn.Module):
    """Norm of `[B, T, d]`. The statistics of a batch norm exclude padding, unless `config.padded_batch_statistics`."""

    def __init__(self, config: MegaConfig, affine: bool):
        super().__init__()
        self.norm = build_norm(
            config.normalization_type,
            config.hidden_size,
            affine=affine,
            padded_statistics=config.padded_batch_statistics,
            legacy_rms_norm=config.legacy_rms_norm,
        )

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, but keep the batch norm if `SyncBatchNorm.convert_sync_batchnorm` replaces it.

        `nn.SyncBatchNorm` would include padding. The batch norm synchronizes its statistics instead.
        """
        if isinstance(module, nn.SyncBatchNorm) and isinstance(self.norm, MegaBatchNorm):
            self.norm.synchronized = True
        else:
            super().add_module(name, module)

    def forward(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        if isinstance(self.norm, MegaBatchNorm):
            return self.norm(hidden_states, layout.mask)
        return self.norm(hidden_states)


class MegaDropout(Dropout):
    """Dropout of entries of `[B, T, d]` or, with `features`, of channels at all positions of a sequence."""

    def __init__(self, probability: float, features: bool):
        super().__init__(probability)
        self.features = features

    def forward(self, states: torch.Tensor, layout: Layout = NO_PADDING) -> torch.Tensor:
        if not self.training:
            return states
        return layout.drop_features(states, self.p) if self.features and self.p else super().forward(states)


class MegaDropPath(Dropout):
    """Stochastic depth: dropout of the output of a sub-layer for an entire sequence."""

    def forward(self, states: torch.Tensor, layout: Layout = NO_PADDING) -> torch.Tensor:
        if self.rate == 0.0:
            return states
        return states * layout.spread(self.draw(states, layout.sizes(states)[0]), states.shape[1])

    def draw(self, states: torch.Tensor, sequences: int) -> torch.Tensor:
        """Return a random factor for each sequence, `[sequences, 1]`: 0 with probability `p`, else 1 / (1 - p)."""
        return nn.functional.dropout(states.new_ones(sequences, 1), self.p)


class MegaSimpleRelativeBias(nn.Module):
    """Table of biases `[2 max_positions - 1]`, one for each distance j - i of a query i and a key j.

    Entry `center` (None = the middle) is distance 0. `MegaPreTrainedModel._init_weights` initializes `rel_pos_bias`.
    """

    def __init__(self, max_positions: int, center: int | None = None):
        super().__init__()
        self.rel_pos_bias = nn.Parameter(torch.empty(2 * max_positions - 1))
        self.center = max_positions - 1 if center is None else center

    def forward(
        self, length: int, grid: tuple[int, int] | None = None, count: Callable[[], int] | None = None
    ) -> torch.Tensor:
        """Return the biases of the distances j - i from `1 - length` to `length - 1`, `[2 length - 1]` float32.

        Args:
            length: number of columns.
            grid: rows and columns of patches of images, for which the table is interpolated; None = no images.
            count: function that returns the number of tokens of the longest sequence; None = `length`. It is called
                only if `length` exceeds the table. Distances outside of the table are then padding, with bias 0.

        Raises:
            ValueError: The table has too few entries.
        """
        if grid is not None:
            return interpolate_raster_bias(upcast(self.rel_pos_bias), grid)
        entries, center = self.rel_pos_bias.shape[0], self.center
        max_length = min(center + 1, entries - center)
        if length > max_length:
            tokens = length if count is None or mode() >= COMPILED else count()
            if tokens <= max_length:
                return nn.functional.pad(self(max_length), [length - max_length] * 2)
            raise ValueError(
                f"a simple relative bias with {entries} entries, distance 0 at entry {center}, supports at most "
                f"{max_length} positions, got {tokens}; shorten the input or increase `max_positions` (with chunks "
                "`chunk_size`)"
            )
        return upcast(self.rel_pos_bias[center - length + 1 : center + length])


class MegaRotaryRelativeBias(nn.Module):
    """<R_i alpha, R_j beta> for any length, where R_t rotates entries m and m + Z/2 by t 10000^(-2m/Z) radians.

    The product depends only on the distance j - i of a query i and a key j, so it is computed once per distance.
    `MegaPreTrainedModel._init_weights` initializes `alpha` and `b_param` (beta).
    """

    def __init__(self, width: int):
        super().__init__()
        if width % 2:
            raise ValueError(f"a rotary relative bias requires an even width, got {width}")
        self.alpha = nn.Parameter(torch.empty(1, width))
        self.b_param = nn.Parameter(torch.empty(1, width))

    def forward(
        self, length: int, grid: tuple[int, int] | None = None, count: Callable[[], int] | None = None
    ) -> torch.Tensor:
        """Return the biases as `MegaSimpleRelativeBias` does; `grid` and `count` do not affect them."""
        alpha, beta = upcast(self.alpha), upcast(self.b_param)
        products = torch.cat((alpha, alpha.roll(alpha.shape[1] // 2, dims=1))) * beta
        # The sums of a matrix product may depend on the number of rows.
        return (rotations(length, alpha) * products.view(-1)).sum(dim=1)


# Elements of the largest table in `_rotation_tables`.
LARGEST_TABLE = 1 << 22
# Tables of `rotations` by positions, pairs, dtype and device. A CUDA graph may read a table, so none is removed.
_rotation_tables: dict[tuple[Any, ...], torch.Tensor] = {}


def rotations(length: int, alpha: torch.Tensor) -> torch.Tensor:
    """Return the factors of alpha_1 beta_1, alpha_2 beta_2, alpha_2 beta_1 and alpha_1 beta_2, `[2 length - 1, 2 Z]`.

    alpha_1 and alpha_2 are the halves of `alpha` `[..., Z]`, of which only the size, dtype and device are used. The
    rows are the distances j - i from `1 - length` to `length - 1`.
    """
    pairs, dtype, device = alpha.shape[-1] // 2, alpha.dtype, alpha.device
    # A power of two, so that there are few tables. Only eager calls read tables.
    positions = 1 << max(length - 1, 0).bit_length() if is_plain((alpha,)) else 0
    if not positions or 8 * positions * pairs > LARGEST_TABLE:
        return compute_rotations(length, pairs, dtype, device)
    key = positions, pairs, dtype, device
    if (table := _rotation_tables.get(key)) is None:
        with torch.inference_mode(False), torch.no_grad():
            table = compute_rotations(positions, pairs, dtype, device)
        # A table that is computed during capture is in the memory of the CUDA graph, so it cannot be reused.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _rotation_tables[key] = table
    return table[positions - length : positions + length - 1]


def compute_rotations(length: int, pairs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    frequency = torch.exp(torch.arange(pairs, dtype=dtype, device=device) * -(math.log(10000.0) / pairs))
    radians = torch.arange(1 - length, length, dtype=dtype, device=device)[:, None] * frequency
    cosine, sine = radians.cos(), radians.sin()
    return torch.cat((cosine, cosine, sine, -sine), 1)


class MegaT5RelativeBias(nn.Module):
    """Biases of T5 (Raffel et al. 2020, section 2.1) for any length: one of 32 numbers for each range of distances.

    Ranges contain one distance up to 16 (in both directions 8), then grow logarithmically up to 128; the last contains
    all larger distances. `MegaPreTrainedModel._init_weights` initializes `rel_pos_bias`.
    """

    buckets, largest = 32, 128

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        self.rel_pos_bias = nn.Parameter(torch.empty(self.buckets))

    def forward(
        self, length: int, grid: tuple[int, int] | None = None, count: Callable[[], int] | None = None
    ) -> torch.Tensor:
        """Return the biases as `MegaSimpleRelativeBias` does; `grid` and `count` do not affect them."""
        distance = torch.arange(1 - length, length, device=self.rel_pos_bias.device)
        ranges = self.buckets if self.causal else self.buckets // 2
        exact = ranges // 2
        first = torch.zeros_like(distance) if self.causal else ranges * (distance > 0)
        distance = -distance.clamp(max=0) if self.causal else distance.abs()
        # In float64, borders of ranges do not depend on the rounding of the logarithm.
        growth = (distance.clamp(min=1).double() / exact).log() / math.log(self.largest / exact)
        far = (exact + (growth * (ranges - exact)).long()).clamp(max=ranges - 1)
        return upcast(self.rel_pos_bias[first + torch.where(distance < exact, distance, far)])


class MegaAlibiRelativeBias(nn.Module):
    """Bias of ALiBi (Press et al. 2022, section 3) for any length: -m |j - i| with m = 2^-8, the slope of one head."""

    slope: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(2.0**-8))

    def forward(
        self, length: int, grid: tuple[int, int] | None = None, count: Callable[[], int] | None = None
    ) -> torch.Tensor:
        """Return the biases as `MegaSimpleRelativeBias` does; `grid` and `count` do not affect them."""
        return -upcast(self.slope) * torch.arange(1 - length, length, device=self.slope.device).abs()


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the features m and m + Z/2 of queries or keys `[B, T, Z]` by t 10000^(-2m/Z) radians at position t.

    RoPE (Su et al. 2021, eq. 34). `positions` are `[B or 1, T]`.
    """
    first, second = upcast(x).chunk(2, dim=-1)
    frequency = torch.exp(
        torch.arange(first.shape[-1], dtype=first.dtype, device=x.device) * (-math.log(10000.0) / first.shape[-1])
    )
    radians = positions[..., None].to(first.dtype) * frequency
    cosine, sine = radians.cos(), radians.sin()
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).to(x.dtype)


def build_relative_bias(config: MegaConfig, positions: int, causal: bool) -> Any:
    """Return the relative bias of `config` or None.

    A table has entries for sequences of `positions` positions. `causal`: no query attends to a later position.
    """
    kind = config.relative_positional_bias
    if kind == "simple":
        return MegaSimpleRelativeBias(positions, config.chunk_size - 1 if config.legacy_bias_table else None)
    if kind == "rotary":
        return MegaRotaryRelativeBias(config.shared_representation_size)
    if kind == "t5":
        return MegaT5RelativeBias(causal)
    return MegaAlibiRelativeBias() if kind == "alibi" else None


def restore_columns(
    attended: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    key_layout: Layout,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attended` `[B, T, V]` in `layout`, and attention weights `[B, 1, T, S]` in the columns of the batch.

    If a layout moves columns, `attended` is computed again from the returned weights, so that they have a gradient.
    """
    restored = key_layout.scatter_weights(layout.scatter_weights(weights, 2), 3)
    if restored is weights:
        return attended, weights
    dropped = torch.dropout(restored[:, 0].to(value.dtype), dropout, train=True)
    return layout.gather(dropped @ key_layout.scatter(value)), restored


class MegaEmbeddings(nn.Module):
    """Embeddings of tokens, real values or patches; only patches have position embeddings.

    `forward` expects the output of the embedding module. It applies scale, projection, positions and token types.
    """

    word_embeddings: MegaAdaptiveEmbedding | nn.Embedding

    def __init__(self, config: MegaConfig):
        super().__init__()
        if config.input_type == "values":
            self.value_embeddings = ValueEmbeddings(config.hidden_size, cast(int, config.num_channels))
        elif config.input_type == "patches":
            self.patch_embeddings = PatchEmbeddings(config)
            if config.use_absolute_position_embeddings:
                patches = (config.image_size // config.patch_size) ** 2
                self.position_embeddings = nn.Parameter(torch.empty(1, patches, config.hidden_size))
        elif config.adaptive_input_cutoffs is not None:
            self.word_embeddings = MegaAdaptiveEmbedding(config)
        else:
            size = config.embedding_size or config.hidden_size
            self.word_embeddings = make_embedding(config.vocab_size, size, blank_token(config))
            if size != config.hidden_size:
                self.projection = nn.Linear(size, config.hidden_size, bias=False)
        if config.add_token_type_embeddings:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0

    def forward(
        self, inputs_embeds: torch.Tensor, token_type_ids: torch.Tensor | None, grid: tuple[int, int] | None = None
    ) -> torch.Tensor:
        hidden_states = inputs_embeds if self.scale == 1.0 else inputs_embeds * self.scale
        if hasattr(self, "projection"):
            hidden_states = self.projection(hidden_states)
        if hasattr(self, "position_embeddings"):
            positions: torch.Tensor = self.position_embeddings
            if grid is not None:
                positions = interpolate_positions(positions, grid)
            elif positions.shape[1] != hidden_states.shape[1]:
                raise ValueError(
                    f"`inputs_embeds` have {hidden_states.shape[1]} positions, but images of this model have "
                    f"{positions.shape[1]} patches; pass `pixel_values`, which can have another size"
                )
            hidden_states = hidden_states + positions
        if not hasattr(self, "token_type_embeddings"):
            return hidden_states
        if token_type_ids is None:
            token_type_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        return hidden_states + self.token_type_embeddings(token_type_ids)


class MegaMovingAverage(nn.Module):
    """Multi-dimensional damped EMA with its skip connection (section 3.1)."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        channel_rows = config.hidden_size * (2 if config.bidirectional else 1)
        states, dtype = config.ema_projection_size, exact_dtype()
        self.damping_factor = nn.Parameter(torch.empty(channel_rows, states, 1, dtype=dtype))
        self.decay_factor = nn.Parameter(torch.empty(channel_rows, states, 1, dtype=dtype))
        self.ema_expansion_matrix = nn.Parameter(torch.empty(channel_rows, states, 1, dtype=dtype))
        self.kernel_projection_matrix = nn.Parameter(torch.empty(channel_rows, states, dtype=dtype))
        self.residual_weight = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))
        self.shift, self.truncation = config.ema_shift, config.truncation

    def forward(self, hidden_states: torch.Tensor, layout: Layout, cache: MegaCacheLayer | None = None) -> torch.Tensor:
        # With a tuple of unknown length, mypy assumes that `*parameters` also fills the arguments after it.
        parameters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
        parameters = derive(self, "parameters", hidden_states, self.flat)
        skip, options = self.residual_weight, layout.options()
        if cache is None:
            options |= {"shift": self.shift, "truncation": self.truncation}
            result: Any = damped_ema(hidden_states, *parameters, skip, **options)
            return result
        state: Any = cache.average
        if self.truncation is not None and state is not None:
            state = TruncatedEmaState(state, cache.forgotten, cache.inputs)
        if state is not None and hidden_states.shape[1] == 1:
            coefficients = None
            if self.truncation is None and keeps_derived(hidden_states):
                compute_coefficients = partial(ema_coefficients, *parameters, dtype=state.dtype)
                coefficients = derive(self, "coefficients", hidden_states, compute_coefficients, state.dtype)
            mask = None if layout.mask is None else layout.mask[:, 0]
            output, state = damped_ema_step(
                hidden_states[:, 0], state, *parameters, skip, mask=mask, coefficients=coefficients
            )
            output = output[:, None]
        else:
            options |= {"truncation": self.truncation, "initial_state": state, "return_state": True}
            output, state = damped_ema(hidden_states, *parameters, skip, lengths=layout.lengths, **options)
        cache.store(**({"average": state} if self.truncation is None else state._asdict()))
        return output

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the parameters in the shape that `damped_ema` requires, `[R, N]`; R = 2 d if bidirectional, else d."""
        damping, decay, expansion = self.damping_factor, self.decay_factor, self.ema_expansion_matrix
        return damping.squeeze(-1), decay.squeeze(-1), expansion.squeeze(-1), self.kernel_projection_matrix


class MegaGatedAttention(nn.Module):
    """Moving average equipped gated attention (section 3.2)."""

    def __init__(self, config: MegaConfig, drop_path_rate: float = 0.0):
        super().__init__()
        self.config = config  # `forward` reads it, because `chunk_size` can be changed later
        # `PreTrainedConfig.__getattribute__` is slow, so `forward` reads attributes instead.
        self.causal, self.pre_norm = config.is_decoder, config.normalize_before_mega
        self.function, self.rotates = config.attention_activation, config.relative_positional_bias == "rope"
        width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
        self.sizes = (width, shared, values, width)
        self.norm = MegaSequenceNorm(config, config.norm_affine)
        self.ema_gate = MegaMovingAverage(config) if config.ema_projection_size else None
        self.v_proj = nn.Linear(width, values)
        self.mx_proj = nn.Linear(width, sum(self.sizes))
        self.h_proj = nn.Linear(values, width)
        self.qk_weight = nn.Parameter(torch.empty(2, shared))
        self.qk_bias = nn.Parameter(torch.empty(2, shared))
        self.rel_pos_bias = build_relative_bias(config, config.bias_positions, self.causal)
        self.activation = ACT2FN[config.activation]
        self.attention_dropout = Dropout(config.attention_probs_dropout_prob)
        self.dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.hidden_dropout = MegaDropout(config.hidden_dropout_prob, config.use_feature_dropout)
        self.drop_path = MegaDropPath(drop_path_rate)

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        output_weights: bool = False,
        cache: MegaCacheLayer | None = None,
        grid: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return states `[B, T, d]`, and with `output_weights` the attention weights `[B, chunks, C, C]`, else None.

        If `cache` is given, the sequences continue from the cache, which is updated in place. For images, `grid`
        specifies the rows and columns of patches.
        """
        residual, chunk = hidden_states, self.config.attention_chunk
        if self.pre_norm:
            hidden_states = self.norm(hidden_states, layout)
        value = self.hidden_dropout(self.activation(self.v_proj(hidden_states)), layout)
        smoothed = hidden_states
        if self.ema_gate is not None:
            smoothed = self.dropout(self.ema_gate(hidden_states, layout, cache), layout)
        update, shared, reset, candidate = self.mx_proj(smoothed).split(self.sizes, dim=-1)
        shared, reset = nn.functional.silu(shared), nn.functional.silu(reset)
        # Two products: a view of a joint product would keep the queries alive in the cache.
        pairs = zip(self.qk_bias.unbind(), self.qk_weight.unbind(), strict=True)
        query, key = (torch.addcmul(bias, shared, weight) for bias, weight in pairs)
        if self.rotates:
            positions = layout.columns_from(layout.start() if cache is None else cache.start(layout.mask), query)
            positions = positions if chunk is None else positions % chunk  # small numbers are exact
            query, key = rotate(query, positions), rotate(key, positions)
        if cache is None:
            window = KeyWindow(key, value, chunk, **layout.key_rows())
        else:
            window = cache.extend(key, value, layout.mask, chunk)
        if output_weights:
            window = window._replace(step=False)  # weights require the bias of a full chunk, not of a step
        dropout = self.attention_dropout.rate
        attended, weights = attend(
            query,
            window,
            bias=self.relative_bias(window, grid, cache),
            function=self.function,
            causal=self.causal,
            dropout=dropout,
            backend=cached_backend(self.config, cache, output_weights),
            return_weights=output_weights,
        )
        if weights is not None and chunk is None:
            attended, weights = restore_columns(attended, weights, value, layout, layout, dropout)
        attended = self.dropout(self.activation(candidate + self.h_proj(attended * reset)), layout)
        # Before the gate as in the original: the output of a dropped sequence is (1 - update) * residual.
        attended = self.drop_path(attended, layout)
        # Under autocast, the residual has a wider dtype, but lerp requires equal dtypes.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.pre_norm:
            output = self.norm(output, layout)
        return output, weights

    def relative_bias(
        self, window: KeyWindow, grid: tuple[int, int] | None = None, cache: MegaCacheLayer | None = None
    ) -> torch.Tensor | None:
        """Return the bias as a vector over the distances in a chunk (without chunks, in a sequence); None = no bias.

        For a single new position, the vector is longer than necessary, so that later steps of `generate` reuse it.
        """
        relative_bias = self.rel_pos_bias
        if relative_bias is None:
            return None
        length, chunk = window.length(), window.chunk_size
        is_simple = isinstance(relative_bias, MegaSimpleRelativeBias)
        if window.step and cache is not None and not is_simple:
            length = max(length, cache.keys.shape[1]) if chunk is None else 2 ** max(6, (length - 1).bit_length())
        if chunk is not None:
            # Use the distances of a full chunk if a table has them anyway, the length is unknown (in programs), or
            # queries start inside a chunk.
            is_full = is_simple or mode() >= COMPILED or (window.offset > 0 and not window.step)
            length, grid = chunk if is_full else min(chunk, length), None

        def count_tokens() -> int:
            if cache is not None:
                # Positions cannot be read during the capture of a CUDA graph. Earlier steps have checked them.
                return 0 if is_capturing(cache.position) else int(cache.position.max())
            return window.length() if window.mask is None else int(window.mask.sum(dim=1).max())

        def compute_bias() -> torch.Tensor:
            return relative_bias(length, grid, count_tokens)

        if not window.step or cache is None:
            return compute_bias()
        bias: torch.Tensor | None = derive(cache, "bias", window.keys, compute_bias, length)
        return bias


class MegaGatedCrossAttention(nn.Module):
    """Compute u * act(W_h(A V * r)) + (1 - u) * x, with attention weights A.

    The gates u, r and the queries are computed from the target x, keys and values V from the source. In the relative
    bias, positions of target and source count from the first token after padding. The paper evaluates cross-attention
    on WMT'16 (section 4.4) without a formula; this class implements the original code.
    """

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.config = config
        width, shared = config.hidden_size, config.shared_representation_size
        self.sizes = (width, width, shared)
        self.norm = MegaSequenceNorm(config, config.norm_affine)
        self.k_proj = nn.Linear(width, shared)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, sum(self.sizes))
        self.h_proj = nn.Linear(width, width)
        self.rel_pos_bias = build_relative_bias(config, config.cross_positions, causal=False)
        self.activation = ACT2FN[config.activation]
        self.attention_dropout = Dropout(config.attention_probs_dropout_prob)
        self.dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.hidden_dropout = MegaDropout(config.hidden_dropout_prob, config.use_feature_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        encoder_hidden_states: torch.Tensor | None,
        encoder_layout: Layout,
        output_weights: bool = False,
        cache: MegaCacheLayer | None = None,
        cross_cache: MegaCrossCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return target states `[B, T, d]`, and with `output_weights` attention weights `[B, 1, T, S]`, else None.

        Args:
            hidden_states: States of the target, `[B, T, d]`, in `layout`.
            layout: Layout of the target.
            encoder_hidden_states: States of the source, `[B, S, d]`, in `encoder_layout`. None if the source is cached.
            encoder_layout: Layout of the source.
            output_weights: Return the attention weights.
            cache: Cache of the self-attention, which already contains the T positions of the target.
            cross_cache: Cache of the keys and values of the source, filled by the first call.
        """
        residual = hidden_states
        if self.config.normalize_before_mega:
            hidden_states = self.norm(hidden_states, layout)
        update, reset, query = self.q_proj(hidden_states).split(self.sizes, dim=-1)
        reset = nn.functional.silu(reset)
        if cross_cache is not None and cross_cache.is_initialized:
            key, value, encoder_layout = cross_cache.keys, cross_cache.values, PaddedLayout(cross_cache.mask)
        else:
            key = self.k_proj(encoder_hidden_states)
            value = self.activation(self.v_proj(encoder_hidden_states))
            if cross_cache is not None:
                cross_cache.store(keys=key, values=value, mask=encoder_layout.mask)
        value = self.hidden_dropout(value)
        dropout, weights, bias = self.attention_dropout.rate, None, None
        options: dict[str, Any] = {"mask": encoder_layout.mask}
        if self.rel_pos_bias is not None:
            positions, offset, row_offset = self.positions(query, key, layout, encoder_layout, cache)
            count = partial(self.count_tokens, query, key, layout, encoder_layout, cache)
            bias = self.rel_pos_bias(positions, count=count)
            options |= {"offset": offset, "row_offset": row_offset}
        options |= {"function": self.config.attention_activation, "dropout": dropout}
        options |= {"backend": cached_backend(self.config, cross_cache, output_weights)}
        attended: Any = gated_attention(query, key, value, bias, return_weights=output_weights, **options)
        if output_weights:
            attended, weights = restore_columns(attended[0], attended[1], value, layout, encoder_layout, dropout)
        attended = self.dropout(self.activation(self.h_proj(attended * reset)))
        # Under autocast, the residual has a wider dtype, but lerp requires equal dtypes.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.config.normalize_before_mega:
            output = self.norm(output, layout)
        return output, weights

    def count_tokens(
        self, query: torch.Tensor, key: torch.Tensor, layout: Layout, source: Layout, cache: MegaCacheLayer | None
    ) -> int:
        """Return the number of tokens of the longest target or source; arguments as in `positions`."""
        target_count = layout.counts() if cache is None else cache.position
        pairs = (target_count, query.shape[1]), (source.counts(), key.shape[1])
        return max(size if count is None else int(count.max()) for count, size in pairs)

    def positions(
        self, query: torch.Tensor, key: torch.Tensor, layout: Layout, source: Layout, cache: MegaCacheLayer | None
    ) -> tuple[int, int, torch.Tensor | None]:
        """Return the number of positions that the bias must cover, and `offset` and `row_offset` of `gated_attention`.

        If `cache` is given, the queries are the last positions of the target.
        """
        length, start, source_start = query.shape[1], layout.start(), source.start()
        offset, positions = 0, max(length, key.shape[1])
        if cache is not None:
            start = cache.position - (length if layout.lengths is None else layout.lengths)
            if mode() != EXPORTED:
                offset, positions = cache.seen - length, max(cache.seen, key.shape[1])
                start = start - offset
            elif self.config.relative_positional_bias == "simple":
                positions = self.config.cross_positions
            else:  # both lengths are symbolic in an exported program, so their sum is used as an upper bound
                longest: Any = cache.position.max().item()
                torch._check(longest >= 1)
                positions = longest + key.shape[1]
        if source_start is None:
            return positions, offset, start
        return positions, offset, -source_start if start is None else start - source_start


class MegaNormalizedFeedForwardNetwork(nn.Module):
    """Feed-forward layer with its norm and residual."""

    def __init__(self, config: MegaConfig, drop_path_rate: float = 0.0):
        super().__init__()
        self.pre_norm = config.normalize_before_ffn
        self.norm = MegaSequenceNorm(config, config.norm_affine)
        self.fc1 = nn.Linear(config.hidden_size, config.nffn_hidden_size)
        self.fc2 = nn.Linear(config.nffn_hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.activation]
        self.dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.hidden_dropout = MegaDropout(config.nffn_activation_dropout_prob, config.use_feature_dropout)
        self.drop_path = MegaDropPath(drop_path_rate)

    def forward(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        residual = hidden_states
        if self.pre_norm:
            hidden_states = self.norm(hidden_states, layout)
        hidden_states = self.hidden_dropout(self.activation(self.fc1(hidden_states)), layout)
        hidden_states = residual + self.drop_path(self.dropout(self.fc2(hidden_states), layout), layout)
        return hidden_states if self.pre_norm else self.norm(hidden_states, layout)


class MegaBlock(GradientCheckpointingLayer):
    """One Mega block (Figure 2): gated attention, then optional cross-attention and feed-forward layer."""

    def __init__(self, config: MegaConfig, drop_path_rate: float = 0.0):
        super().__init__()
        self.mega_layer = MegaGatedAttention(config, drop_path_rate)
        self.cross_attn = MegaGatedCrossAttention(config) if config.add_cross_attention else None
        self.nffn = MegaNormalizedFeedForwardNetwork(config, drop_path_rate) if config.use_normalized_ffn else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_layout: Layout = NO_PADDING,
        output_weights: bool = False,
        cache: MegaCacheLayer | None = None,
        cross_cache: MegaCrossCacheLayer | None = None,
        grid: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        hidden_states, _ = self.mega_layer(hidden_states, layout, output_weights=output_weights, cache=cache, grid=grid)
        if self.cross_attn is not None:
            hidden_states, _ = self.cross_attn(
                hidden_states,
                layout,
                encoder_hidden_states,
                encoder_layout,
                output_weights=output_weights,
                cache=cache,
                cross_cache=cross_cache,
            )
        return hidden_states if self.nffn is None else self.nffn(hidden_states, layout)


class MegaDense(nn.Module):
    """Dense layer with an activation, used as the pooler and as the output projection."""

    def __init__(self, config: MegaConfig, activation: str):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[activation]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden_states))


class MegaPreTrainedModel(CommonPreTrainedModel):
    """Base class of the Mega models: configuration, initialization and class attributes of transformers."""

    config_class = MegaConfig
    config: MegaConfig
    base_model_prefix = "mega"
    body_options = {"add_pooling_layer": False}
    cache_class, seq2seq_cache_class = MegaCache, MegaSeq2SeqCache
    _no_split_modules = ["MegaBlock"]
    # Half precision cannot represent the decay q = 1 - alpha delta of a state near 1 (1 - q down to 1e-5).
    _keep_in_fp32_modules_strict = ["ema_gate"]
    # Placeholder buffers of the original code, with arbitrary content.
    _keys_to_ignore_on_load_unexpected = [r"rel_pos_bias\._float_tensor$"]
    _can_record_outputs = {
        "hidden_states": StateRecorder,
        "attentions": OutputRecorder(MegaGatedAttention, index=1),
        "cross_attentions": OutputRecorder(MegaGatedCrossAttention, index=1),
    }

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        if config.normalization_type.endswith("batchnorm"):
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, "running_mean", "running_var"]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary. Raises `NotImplementedError` for an adaptive vocabulary."""
        if self.config.adaptive_input_cutoffs is not None or self.config.adaptive_softmax_cutoffs is not None:
            raise NotImplementedError("an adaptive vocabulary cannot be resized; build a model with the new size")
        return super().resize_token_embeddings(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        config, std = self.config, self.config.initializer_range
        if isinstance(module, MegaMovingAverage):
            init.normal_(module.damping_factor, std=config.ema_delta_alpha_range)
            init.normal_(module.decay_factor, std=config.ema_delta_alpha_range)
            signs = torch.ones_like(module.ema_expansion_matrix)
            signs[:, 1::2] = -1.0
            noise = torch.randn_like(signs) * config.ema_beta_range
            init.copy_(module.ema_expansion_matrix, signs + noise)
            init.normal_(module.kernel_projection_matrix, std=config.ema_gamma_omega_range)
            init.normal_(module.residual_weight, std=config.ema_gamma_omega_range)
        elif isinstance(
            module, MegaBandProjection | MegaSimpleRelativeBias | MegaRotaryRelativeBias | MegaT5RelativeBias
        ):
            for parameter in module.parameters():
                init.normal_(parameter, std=std)
        elif isinstance(module, MegaAlibiRelativeBias):
            init.constant_(module.slope, 2.0**-8)
        elif isinstance(module, MegaGatedAttention):
            init.normal_(module.qk_weight, std=std)
            init.zeros_(module.qk_bias)
        elif isinstance(module, MegaScaleNorm) and module.scalar is not None:
            init.ones_(module.scalar)
        elif isinstance(module, nn.Embedding) and config.scale_embedding:
            # `scale_embedding` multiplies embeddings by sqrt(d), so that their standard deviation is around 1.
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.Conv2d):  # patch embeddings
            bound = module.weight[0].numel() ** -0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)
        elif isinstance(module, MegaEmbeddings) and hasattr(module, "position_embeddings"):
            trunc_normal_(module.position_embeddings, std=config.hidden_size**-0.5)
        elif isinstance(module, ValueEmbeddings):
            init.normal_(module.weight, std=cast(int, config.num_channels) ** -0.5)
            init.normal_(module.bias, std=0.1)
        clear_row(module)


@dataclass
class MegaModelOutput(BaseModelOutputWithPoolingAndCrossAttentions):
    """Output of `MegaModel`. B sequences of T positions, S of the source, attention chunks of C positions, width d.

    Args:
        last_hidden_state: `[B, T, d]`, undefined at padding.
        pooler_output: `[B, d]`; None without a pooler and for padding-free batches.
        attention_mask: `[B, T]`, 1 = a kept position; None = all.
        cache: cache of a decoder with `use_cache`.
        hidden_states: with `output_hidden_states=True`, `[B, T, d]` before and after each layer.
        attentions: with `output_attentions=True`, `[B, chunks, C, C]` of each layer.
        cross_attentions: the same for the cross-attention of a decoder, `[B, 1, T, S]`.
    """

    attention_mask: torch.Tensor | None = None


class MegaModel(BodyMixin, MegaPreTrainedModel):
    """Mega without a head: the encoder, or with `is_decoder` the decoder of a language model."""

    embeddings_name = "embedding_layer"

    def __init__(self, config: MegaConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        if config.legacy_bias_table:
            self.built_with["chunk_size"] = config.chunk_size  # determines the center of the bias table
        self.closes_gaps = config.input_type != "patches"  # patches keep their places in the image
        self.embedding_layer = MegaEmbeddings(config)
        self.embedding_norm = MegaSequenceNorm(config, config.norm_affine) if config.embedding_norm else None
        dropout = 0.0 if config.input_type == "patches" else config.dropout_prob
        self.embedding_dropout = MegaDropout(dropout, config.use_feature_dropout)
        last = max(config.num_hidden_layers - 1, 1)
        rates = [config.drop_path_rate * layer / last for layer in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(MegaBlock(config, rate) for rate in rates)
        self.recorder = StateRecorder()
        self.final_norm = MegaSequenceNorm(config, config.final_norm_affine) if config.final_norm else None
        self.output_projection = MegaDense(config, "silu") if config.output_projection else None
        self.pooler = MegaDense(config, "tanh") if add_pooling_layer and config.input_type != "patches" else None
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def token_types(self) -> int:
        return self.config.type_vocab_size if self.config.add_token_type_embeddings else 0

    @property
    def input_width(self) -> int:
        config = self.config
        projects = config.input_type == "tokens" and config.adaptive_input_cutoffs is None
        return (config.embedding_size if projects else None) or config.hidden_size

    @accept_past_key_values
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        input_values: torch.FloatTensor | None = None,
        cache: MegaCache | MegaSeq2SeqCache | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        interpolate_pos_encoding: bool = False,
        # Not named `**kwargs`: `generate` would pass arguments of the decoder to the encoder.
        **options: Unpack[TransformersKwargs],
    ) -> MegaModelOutput:
        """Run the model on B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens (`input_type="tokens"`).
            attention_mask: `[B, T]`, 1 = keep, 0 = drop. None = keep all positions or, with `input_ids`, all that are
                not `pad_token_id`. Dropped positions have no effect, even between kept positions, and their inputs may
                be NaN; only dropped patches still count as positions. Values other than 0 and 1 raise an error on CPU
                outside of compiled and exported programs; elsewhere they are treated as 1.
            token_type_ids: `[B, T]`, less than `type_vocab_size`; without `add_token_type_embeddings`, only 0 is
                supported. None = all 0.
            inputs_embeds: `[B, T, d]` embeddings instead of tokens, values or patches.
            input_values: `[B, T]` real numbers (`input_type="values"`), or `[B, T, num_channels]`.
            cache: Only with `is_decoder`: cache of earlier positions, which is updated in place. `attention_mask` then
                applies to the T new positions, or to all earlier and new positions.
            use_cache: Only with `is_decoder`: return the cache. None = `config.use_cache`, but not in training.
            encoder_hidden_states: `[B, S, d]`, only with `add_cross_attention`: states of the source. With a cache,
                keys and values of the source are cached as well.
            encoder_attention_mask: `[B, S]`, 1 = keep. None = all. Attention to a source without tokens is 0.
            pixel_values: `[B, num_channels, height, width]` images (`input_type="patches"`); the T positions are their
                patches in row-major order.
            interpolate_pos_encoding: Support images of any size that is a multiple of the patch size: interpolate
                position embeddings (bicubic) and the table of a simple bias.
            options: `output_hidden_states`, `output_attentions`, `return_dict`, and for padding-free batches (see
                `DataCollatorWithFlattening`) `position_ids` `[B, T]`, which restart at every sequence, `seq_idx`
                `[B, T]`, or `cu_seq_lens_q` `[sequences + 1]` and `max_length_q` (`cu_seq_lens_k` and `max_length_k`
                must be equal). Padding-free batches support no cache, and only `seq_idx` supports an `attention_mask`.
                In other batches, `position_ids` must equal `attention_mask.cumsum(1) - 1`.

        Returns:
            `MegaModelOutput`.

        Raises:
            ValueError: Not exactly one kind of input, an empty batch, an invalid mask, a sequence longer than the bias
                table, or an argument that Mega does not support.
        """
        grid = None
        if pixel_values is not None:
            if self.config.input_type != "patches":
                kind = self.config.input_type
                raise ValueError(f"`pixel_values` require input_type='patches', got {kind!r}; omit them")
            grid = self.embedding_layer.patch_embeddings.find_grid(pixel_values, interpolate_pos_encoding)
        inputs = prepare(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            pixel_values=pixel_values,
            grid=grid,
            position_ids=options.get("position_ids"),
            token_type_ids=token_type_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            model_cache=cache,
            use_cache=use_cache,
            options=options,
        )
        layout = inputs.layout
        types = None if inputs.token_type_ids is None else layout.gather(inputs.token_type_ids)
        hidden_states = self.embed_inputs(embed(self, inputs), layout, types, grid)
        # The states of `output_hidden_states` have gradients only if the next layer reads them.
        batch_states = layout.scatter(hidden_states) if inputs.output_states else None
        caches: Any = [(None, None)] * len(self.layers)
        if inputs.model_cache is not None:
            caches = layer_caches(inputs.cache, inputs.cross_cache, len(self.layers))
        for layer, (own_cache, cross_cache) in zip(self.layers, caches, strict=True):
            if batch_states is not None:
                hidden_states = layout.gather(batch_states)
            hidden_states = layer(
                hidden_states,
                layout,
                inputs.encoder_hidden_states,
                encoder_layout=inputs.encoder_layout,
                output_weights=inputs.output_weights,
                cache=own_cache,
                cross_cache=cross_cache,
                grid=grid,
            )
            if batch_states is not None:
                batch_states = self.recorder(batch_states, layout.scatter(hidden_states))
        hidden_states = scatter_states(inputs, self.final_states(hidden_states, layout))
        pooler_output = None
        if self.pooler is not None and layout.has_rows():
            pooler_output = self.pooler(first_token(hidden_states, inputs.mask))
        return MegaModelOutput(
            last_hidden_state=hidden_states,
            pooler_output=pooler_output,
            attention_mask=None if inputs.mask is None or not self.returns_mask else inputs.mask.long(),
            **cache_field(inputs.model_cache),
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens, of real values or of patches."""
        return getattr(self.embedding_layer, self._input_embed_layer)

    def embed_inputs(
        self,
        embeddings: torch.Tensor,
        layout: Layout,
        token_type_ids: torch.Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Return the input `[B, T, d]` of the first layer."""
        hidden_states = self.embedding_layer(embeddings, token_type_ids, grid)
        if self.embedding_norm is not None:
            hidden_states = self.embedding_norm(hidden_states, layout)
        hidden_states = self.embedding_dropout(hidden_states, layout)
        # In the original, the statistics of batch norms include padding, and the states at padding are 0.
        return layout.clear_padding(hidden_states) if self.config.padded_batch_statistics else hidden_states

    def final_states(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the states `[B, T, d]` for the heads."""
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states, layout)
        return hidden_states if self.output_projection is None else self.output_projection(hidden_states)


MegaPreTrainedModel.body_class = MegaModel


class MegaForMaskedLM(GenericForMaskedLM, MegaPreTrainedModel):
    """Mega with a masked-language-modeling head."""

    _tied_weights_keys = {"mlm_head.weight": "mega.embedding_layer.word_embeddings.weight"}
    output_class = MaskedLMOutput
    output_layer = "mlm_head"

    def make_head(self, config: MegaConfig) -> None:
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.add_lm_hidden_dense_layer else None
        self.dropout = nn.Dropout(config.dropout_prob)
        check_tied_widths(config)
        self.mlm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def score_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            hidden_states = torch.tanh(self.dense(hidden_states))
        return self.mlm_head(self.dropout(hidden_states))


class MegaClassificationHead(ClassificationHead):
    """Classification head whose first layer is named `dense`, as in transformers v4."""

    def name_layers(self, layers: list[nn.Linear]) -> None:
        self.dense, self.deeper = layers[0] if layers else None, nn.ModuleList(layers[1:])

    def dense_layers(self) -> list[nn.Linear]:
        return [] if self.dense is None else [self.dense, *self.deeper]


class MegaPooledHead(PooledHead):
    """Base class of the heads on pooled states (`config.pooling`)."""

    head_class = MegaClassificationHead

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        head = self.classifier
        if self.config.input_type == "patches" and isinstance(module, nn.Linear):
            if module in (*head.dense_layers(), head.out_proj):
                init.xavier_uniform_(module.weight)


class MegaForSequenceClassification(MegaPooledHead, GenericForSequenceClassification, MegaPreTrainedModel):
    """Mega with a sequence classification or regression head on the pooled states (`config.pooling`)."""

    output_class = SequenceClassifierOutput


class MegaForImageClassification(MegaPooledHead, MegaPreTrainedModel):
    """Mega with an image classification head (Table 7) on the pooled states of the patches (`config.pooling`)."""

    main_input_name = "pixel_values"
    output_class = ImageClassifierOutput

    def check_config(self, config: MegaConfig) -> None:
        if config.input_type != "patches":
            raise ValueError(f"{type(self).__name__} needs input_type='patches', got {config.input_type!r}")

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images `[B, C, H, W]`, see `MegaModel.forward`.

        `attention_mask`: `[B, P]`, 1 = keep the patch; None = all. `labels`: `[B]` class ids, or numbers for
        regression. `logits`: `[B, num_labels]`.
        """
        if labels is not None and pixel_values is not None:
            check_pooled_labels(self.config, labels, len(pixel_values))
        outputs = self.base_model(
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            return_dict=True,
            **kwargs,
        )
        return self.make_output(self.classifier(self.summarize(outputs)), outputs, labels)


class MegaForSequencePairClassification(MegaPooledHead, GenericForSequencePairClassification, MegaPreTrainedModel):
    """Classification of pairs of sequences, encoded separately with the same weights (LRA Retrieval)."""


class MegaForMultipleChoice(GenericForMultipleChoice, MegaPreTrainedModel):
    """Mega with a multiple choice head."""

    body_options = {}
    output_class = MultipleChoiceModelOutput
    classifier: Any  # an nn.Linear, not a classification head

    def make_head(self, config: MegaConfig) -> None:
        self.dropout = nn.Dropout(config.classifier_dropout or 0.0)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def summarize(self, outputs: Any) -> torch.Tensor:
        body: Any = self.base_model
        return body.pooler(super().summarize(outputs))  # `pooler_output` of the body is that of the first token

    def score_options(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(features))


class MegaForTokenClassification(GenericForTokenClassification, MegaPreTrainedModel):
    """Mega with a token classification head."""

    output_class = TokenClassifierOutput


class MegaForQuestionAnswering(GenericForQuestionAnswering, MegaPreTrainedModel):
    """Mega with a head for extractive question answering."""

    output_class = QuestionAnsweringModelOutput


_WORD_EMBEDDINGS = "embedding_layer.word_embeddings.weight"


class MegaForCausalLM(GenericForCausalLM, StateGenerationMixin, MegaPreTrainedModel):
    """Mega with a language-modeling head. Generation uses constant memory if attention is restricted to chunks.

    Requires `is_decoder=True` and `bidirectional=False`.
    """

    _tied_weights_keys = {"lm_head.weight": f"mega.{_WORD_EMBEDDINGS}"}
    output_class = CausalLMOutputWithCrossAttentions
    mega: MegaModel
    lm_head: Any  # nn.Linear or MegaAdaptiveSoftmax

    def check_config(self, config: MegaConfig) -> None:
        if not config.is_decoder:
            raise ValueError("MegaForCausalLM requires a configuration with is_decoder=True and bidirectional=False")

    def make_head(self, config: MegaConfig) -> None:
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.add_lm_hidden_dense_layer else None
        self.dropout = nn.Dropout(config.dropout_prob)
        if config.adaptive_softmax_cutoffs is None:
            check_tied_widths(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        else:
            self.lm_head = MegaAdaptiveSoftmax(config)
            self._tied_weights_keys = {}  # tied weights are parameters of the embedding only

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer, or None for an adaptive softmax, which has several output layers."""
        return None if self.config.adaptive_softmax_cutoffs is not None else super().get_output_embeddings()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raise `ValueError` for a `forward` of TRL that would skip layers of the head."""
        code = getattr(value, "__code__", None)
        if name == "forward" and code is not None and "fused_lm_head" in code.co_varnames:
            adaptive = self.config.adaptive_softmax_cutoffs is not None
            if adaptive or self.dense is not None:
                what = "an adaptive softmax" if adaptive else "a dense layer (add_lm_hidden_dense_layer=True)"
                raise ValueError(f"TRL computes logits from lm_head.weight, but this model has {what}; use Trainer")
        super().__setattr__(name, value)

    @accept_past_key_values
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        cache: MegaCache | MegaSeq2SeqCache | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithCrossAttentions:
        """Predict the next token of each position from the inputs of `MegaModel.forward`.

        `labels` `[B, T]` are token ids, usually `input_ids`; the loss shifts them and ignores -100. The keyword
        argument `shift_labels` `[B, T]` replaces `labels`: the token after each position, including the last position.

        `logits` are `[B, T, vocab_size]`, restricted to the last `logits_to_keep` positions or to the positions in
        `logits_to_keep` if it is a tensor. The logits of an adaptive softmax are log-probabilities, or None if labels
        are given.

        Raises:
            ValueError: As in `MegaModel.forward`, and if labels do not match the positions of `logits_to_keep`.
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
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
        )

    def score_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.dropout(self._project(hidden_states)))

    def score_next(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        targets: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss and the logits; an adaptive softmax returns the loss if labels are given, else the logits."""
        if self.config.adaptive_softmax_cutoffs is None:
            return super().score_next(hidden_states, labels, targets, **kwargs)
        hidden_states = self._project(hidden_states)
        # A method, because Accelerate moves modules in arguments, which fails if their weights are offloaded.
        embedding = self.mega.get_input_embeddings().__call__
        if targets is None:
            return None, self.lm_head(hidden_states.flatten(0, 1), embedding).unflatten(0, hidden_states.shape[:2])
        has_label = targets != -100
        hidden_states, targets, count = hidden_states[has_label], targets[has_label], has_label.sum()
        total = checked_loss(
            lambda: self.lm_head.loss(hidden_states, targets, embedding), targets, self.config.vocab_size
        )
        items = kwargs.get("num_items_in_batch")
        return total / (count if items is None else items), None

    def _project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self.dense is None else torch.tanh(self.dense(hidden_states))


class MegaSeq2SeqModel(Seq2SeqBody, MegaPreTrainedModel):
    """A Mega encoder and a Mega decoder with gated cross-attention, without a head.

    `cross_attentions` has one tensor `[B, 1, T, S]` per layer. Other attention weights are as in `MegaModel`. If
    `encoder_outputs` is a tuple, it contains the token states and, unless all tokens are kept, the token mask.
    """

    config_class = MegaSeq2SeqConfig
    _tied_weights_keys = {f"decoder.{_WORD_EMBEDDINGS}": f"encoder.{_WORD_EMBEDDINGS}"}
    encoder_output_class = MegaModelOutput


class MegaForConditionalGeneration(Seq2SeqLM, Seq2SeqGenerationMixin, MegaPreTrainedModel):
    """Mega encoder-decoder with a language-modeling head, for translation and other sequence-to-sequence tasks."""

    config_class = MegaSeq2SeqConfig
    body_class = MegaSeq2SeqModel
    _tied_weights_keys = {"lm_head.weight": f"mega.decoder.{_WORD_EMBEDDINGS}"}
    output_class = Seq2SeqLMOutput
    mega: MegaSeq2SeqModel
    lm_head: nn.Linear

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.lm_head:
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    def _prepare_cache_for_generation(
        self, config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode, batch: int, length: int
    ) -> Any:
        """Prepare the cache; raise `ValueError` if targets could exceed the relative bias tables."""
        decoder = self.mega.decoder.config
        table_lengths = [decoder.cross_positions, *([] if decoder.use_chunking else [decoder.max_positions])]
        if decoder.relative_positional_bias == "simple" and length > min(table_lengths):
            raise ValueError(
                f"max_length={length + 1} requires {length} positions of the decoder, but its "
                f"relative bias has {min(table_lengths)}; reduce max_length"
            )
        super()._prepare_cache_for_generation(config, model_kwargs, mode, batch, length)


__all__ = [
    "MegaCache",
    "MegaCrossCache",
    "MegaForCausalLM",
    "MegaForConditionalGeneration",
    "MegaForImageClassification",
    "MegaForMaskedLM",
    "MegaForMultipleChoice",
    "MegaForQuestionAnswering",
    "MegaForSequenceClassification",
    "MegaForSequencePairClassification",
    "MegaForTokenClassification",
    "MegaModel",
    "MegaPreTrainedModel",
    "MegaSeq2SeqCache",
    "MegaSeq2SeqModel",
]
