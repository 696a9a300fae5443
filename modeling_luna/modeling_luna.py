"""Luna: Linear Unified Nested Attention (Ma et al. 2021, arXiv 2106.01540).

Attention to a context of length n has two steps: a short *packed* sequence P of l rows attends to the context (pack),
and every token attends to the resulting l rows (unpack). Time and memory are linear in n. Each layer returns P in
addition to the tokens. A decoder attends to the tokens so far through sums over them (section 3.3). From top to bottom:
outputs, caches, embeddings, attention, causal attention, layers, stack of layers, inputs, model, heads, language
models, translation.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.pytorch_utils import apply_chunking_to_forward
from transformers.utils.generic import ModelOutput, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import (
    LunaCausalState,
    luna_causal_attention,
    luna_causal_attention_step,
    luna_pack,
    luna_unpack,
)
from luna_mega.kernels.for_models import COMPILED, Dropout, forbid_capture, mode
from luna_mega.modeling_common.arguments import HeadKwargs, ModelKwargs
from luna_mega.modeling_common.base import (
    BodyMixin,
    CommonPreTrainedModel,
    accept_past_key_values,
    clear_row,
    make_embedding,
)
from luna_mega.modeling_common.cache import StateCache, StateLayer, StateSeq2SeqCache, layer_caches
from luna_mega.modeling_common.generation import Seq2SeqGenerationMixin, StateGenerationMixin
from luna_mega.modeling_common.heads import (
    GenericForCausalLM,
    GenericForMaskedLM,
    GenericForQuestionAnswering,
    GenericForTokenClassification,
)
from luna_mega.modeling_common.inputs import Inputs, ValueEmbeddings, embed, prepare, scatter_states
from luna_mega.modeling_common.layout import NO_PADDING, Layout
from luna_mega.modeling_common.masks import blank_token, can_look, is_sound, to_bool_mask
from luna_mega.modeling_common.outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    cache_field,
    kept_positions,
)
from luna_mega.modeling_common.pooled_heads import (
    POOLINGS,
    GenericForMultipleChoice,
    GenericForSequenceClassification,
    GenericForSequencePairClassification,
    PooledHead,
    first_token,
    masked_mean,
)
from luna_mega.modeling_common.processes import has_peers
from luna_mega.modeling_common.seq2seq import Seq2SeqBody, Seq2SeqLM
from luna_mega.modeling_luna.configuration_luna import LunaConfig, LunaSeq2SeqConfig

PackedStates = list[torch.Tensor | None]  # of each layer
Packed = tuple[PackedStates, torch.Tensor | None]


@dataclass
class LunaModelOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Output of `LunaModel`. B sequences of T positions, L = min(l, T) rows of P, width d, N layers.

    Args:
        last_hidden_state: `[B, T, d]`.
        packed_last_hidden_state: `[B, L, d]`; rows that `packed_mask` excludes are undefined.
        packed_mask: `[B, L]`, 1 = a row of P that is in use; None = all.
        attention_mask: `[B, T]`, 1 = a kept position; None = all.
        cache: cache of a decoder with `use_cache`.
        hidden_states, packed_hidden_states: with `output_hidden_states=True`, N + 1 tensors each, the embeddings first.
        attentions: with `output_attentions=True`, the unpack weights of every layer, `[B, heads, T, L]`.
        cross_attentions: the same for the cross-attention of a decoder.
        packed_attentions: with `output_packed_attentions=True`, the pack weights, `[B, pack heads, L, T]`; in a
            decoder, the weights of the cross-attention.
    """

    packed_last_hidden_state: torch.FloatTensor | None = None
    packed_mask: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    packed_hidden_states: tuple[torch.Tensor | None, ...] | None = None
    packed_attentions: tuple[torch.FloatTensor, ...] | None = None


class LunaCacheLayer(StateLayer):
    """State of one attention.

    Causal attention stores its state (`key_mean` `[B, H, K, L]`, `value_mean` `[B, H, L, K]`, `count` `[B]`), and of P
    `pack_query` `[B, L, H, K]` and `pack_mask` `[B, L]`, None if all rows are in use. Cross-attention stores the unpack
    `key` and `value` `[B, L, H, K]` of the packed source.
    """

    # Slots, see `StateLayer`. `_owned`: the state was computed without gradients, so that no graph contains it.
    __slots__ = ("_owned",)
    key: torch.Tensor
    value: torch.Tensor
    key_mean: torch.Tensor
    value_mean: torch.Tensor
    count: torch.Tensor
    pack_query: torch.Tensor
    fields = ("key_mean", "value_mean", "count", "pack_query", "pack_mask", "key", "value")

    @property
    def state(self) -> LunaCausalState:
        """Return the state of causal attention."""
        return LunaCausalState(self.key_mean, self.value_mean, self.count)

    def store_state(self, state: LunaCausalState, length: int) -> None:
        """Replace the state of causal attention after `length` more positions."""
        self.store(length, **state._asdict())
        self._owned = not torch.is_grad_enabled()

    def writes_over(self) -> bool:
        """Return whether a step may overwrite this state: autograd, a program and other objects hold no reference."""
        if self.is_static:
            return True
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not getattr(self, "_owned", False):
            return False
        return torch.is_inference_mode_enabled() or not self.key_mean.is_inference()


class LunaCache(StateCache):
    """Cache of a Luna decoder without cross-attention."""

    layer_class = LunaCacheLayer
    sized_by = ("hidden_size", "num_attention_heads", "projection_length")


class LunaSeq2SeqCache(StateSeq2SeqCache):
    """Cache of a Luna decoder with cross-attention: a `LunaCache` for self-attention and one for cross-attention."""

    self_attention_class = cross_attention_class = LunaCache


def sinusoids(positions: torch.Tensor, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sinusoids of positions `[...]`, `[..., width]`: sines, then cosines, as in fairseq.

    They are computed in float32, or in `dtype` if it is wider, and returned in `dtype`.
    """
    half, wide = width // 2, torch.promote_types(dtype, torch.float32)
    index = torch.arange(half, device=positions.device, dtype=wide)
    angle = positions[..., None].to(wide) * torch.exp(index * (-math.log(10000.0) / (half - 1)))
    return nn.functional.pad(torch.cat([angle.sin(), angle.cos()], dim=-1), (0, width % 2)).to(dtype)


class LunaEmbeddings(nn.Module):
    """Tokens or values plus positions, and the initial packed sequence P."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.config = config
        width, narrow = config.hidden_size, cast(int, config.embedding_size)
        if config.input_type == "tokens":
            self.word_embeddings = make_embedding(config.vocab_size, narrow, blank_token(config))
        else:
            self.value_embeddings = ValueEmbeddings(width, config.num_channels)
        if config.position_embedding_type == "learned":
            rows = config.max_position_embeddings + config.position_offset
            self.position_embeddings = make_embedding(rows, narrow, config.position_offset - 1)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, narrow)
        # A decoder has the P of its encoder.
        self.has_projection = not config.add_cross_attention
        if self.has_projection:
            layers = () if config.contextual_projection else (config.num_hidden_layers,)
            self.packed_embeddings = nn.Parameter(torch.empty(*layers, config.projection_length, width))
        if config.embedding_norm:
            self.layer_norm = nn.LayerNorm(narrow, eps=config.layer_norm_eps)
            if self.has_projection:
                self.packed_layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        if narrow != width:
            self.projection = nn.Linear(narrow, width)
        self.dropout = Dropout(config.dropout)
        self.word_dropout = Dropout(config.word_dropout)
        self.scale, self.offset = math.sqrt(width) if config.scale_embedding else 1.0, config.position_offset

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        layout: Layout,
        position_ids: torch.Tensor,
        with_packed: bool,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[list[torch.Tensor], torch.Tensor | None] | None]:
        """Add positions `[B or 1, T]` and token types `[B, T]` to embeddings `[B, T, E]`; then norm and dropout.

        Return these and, with `with_packed`, the result of `packed`. One call returns both, because FSDP and offloading
        load the weights of a module only during its `forward`.
        """
        hidden_states = inputs_embeds if self.scale == 1.0 else inputs_embeds * self.scale
        if self.word_dropout.rate > 0.0:
            hidden_states = hidden_states * self.word_dropout(hidden_states.new_ones((*hidden_states.shape[:2], 1)))
        if self.config.position_embedding_type != "none":
            hidden_states = hidden_states + self.positions(position_ids, hidden_states.dtype)
        if self.config.type_vocab_size:
            types = self.token_type_embeddings
            hidden_states = hidden_states + (types.weight[0] if token_type_ids is None else types(token_type_ids))
        if self.config.embedding_norm:
            hidden_states = self.layer_norm(hidden_states)
        if self.config.embedding_size != self.config.hidden_size:
            hidden_states = self.projection(hidden_states)
        hidden_states = layout.clear_padding(self.dropout(hidden_states))
        return hidden_states, self.packed(inputs_embeds, layout) if with_packed else None

    def positions(self, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return position embeddings, `[B or 1, T, d]`."""
        position_ids = position_ids + self.offset
        if self.config.position_embedding_type == "learned":
            return self.position_embeddings(position_ids).to(dtype)
        return sinusoids(position_ids, cast(int, self.config.embedding_size), dtype)

    def packed(self, inputs_embeds: torch.Tensor, layout: Layout) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the initial P `[B, L, d]` (one per layer unless P is contextual) and its mask `[B, L]`.

        P is cut to min(l, T) rows, and a sequence of n tokens uses n of them. Compiled and exported programs support
        every T, and therefore do not cut P.
        """
        width, (batch, length), count = self.config.hidden_size, layout.sizes(inputs_embeds), layout.counts()
        packed: torch.Tensor = self.packed_embeddings
        packed_mask = None
        if self.config.dynamic_projection_length:
            if not torch.compiler.is_compiling():
                packed = packed[..., :length, :]
            elif count is None:
                count = inputs_embeds.new_ones((batch, length), dtype=torch.long).sum(dim=1, keepdim=True)
            if count is not None:
                packed_mask = torch.arange(packed.shape[-2], device=count.device) < count
        packed = packed * self.scale
        if self.config.position_embedding_type == "sinusoidal":
            rows = torch.arange(packed.shape[-2], device=packed.device)
            packed = packed + sinusoids(rows, width, packed.dtype)
        if self.config.embedding_norm:
            packed = self.packed_layer_norm(packed)
        layers = [packed] if self.config.contextual_projection else [*packed.unbind()]
        # Expanded before dropout, so that every sequence has its own dropout mask.
        layers = [self.dropout(packed.expand(batch, -1, -1)) for packed in layers]
        if packed_mask is not None:
            layers = [packed.masked_fill(~packed_mask[..., None], 0.0) for packed in layers]
        return layers, packed_mask


class LunaProjections(nn.Module):
    """Base of the attentions: linear layers by name, and projections of keys and values, split into heads."""

    query: nn.Linear
    output: nn.Linear
    key_value: nn.Linear  # if keys and values are tied, else `key` and `value`
    key: nn.Linear
    value: nn.Linear
    pack_query: nn.Linear
    pack_key_value: nn.Linear
    pack_key: nn.Linear
    pack_value: nn.Linear

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.dropout, self.tied = Dropout(config.attention_dropout), config.tie_key_value

    def add_linears(self, width: int, *names: str) -> None:
        for name in names:
            self.add_module(name, nn.Linear(width, width))

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unpack keys and values of states `[B, L, d]`, `[B, L, heads, K]` each."""
        if self.tied:
            key = self.key_value(states).unflatten(-1, (-1, self.head_size))
            return key, key
        key, value = self.key(states), self.value(states)
        return key.unflatten(-1, (-1, self.head_size)), value.unflatten(-1, (-1, self.head_size))


class LunaAttention(LunaProjections):
    """Pack and unpack attention with its projections (section 3.1, `LunarMultiheadAttention` of the original)."""

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        width = config.hidden_size
        self.pack_head_size = width // cast(int, config.num_pack_attention_heads)
        keys = ("key_value",) if self.tied else ("key", "value")
        self.add_linears(width, "pack_query", "query", *(f"pack_{name}" for name in keys), *keys, "output")

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor | None,
        layout: Layout = NO_PADDING,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: LunaCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Attend from queries `[B, T, d]` through P `[B, L, d]` (eq. 4) to a context `[B, M, d]`.

        The context is `encoder_hidden_states`, or `hidden_states` if it is None. A filled `cache` contains the packed
        context already, so that P, `encoder_hidden_states` and the returned packed context are None. `layout` is
        the layout of the context, and `packed_mask` `[B, L]` is bool, True = keep.

        Returns:
            The output `[B, T, d]`, the packed context `[B, L, d]`, and with `output_weights` the unpack weights
            `[B, heads, T, L]` and pack weights `[B, pack heads, L, M]` (else None).
        """
        query = self.query(hidden_states).unflatten(-1, (-1, self.head_size))
        packed_context = pack_weights = None
        if cache is not None and cache.is_initialized:
            key, value, layout = cache.key, cache.value, NO_PADDING
        else:
            context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            packed_context, pack_weights = self.pack(packed, context, layout, output_weights)
            key, value = self.project(packed_context)
            if cache is not None:
                cache.store(key.shape[1], key=key, value=value)
        result: Any = luna_unpack(
            query,
            key,
            value,
            dropout=self.dropout.rate,
            return_weights=output_weights,
            **(layout.options() | {"mask": packed_mask}),  # the keys are rows of P
        )
        heads, weights = result if output_weights else (result, None)
        return self.output(heads.flatten(2)), packed_context, weights, pack_weights

    def pack(
        self, packed: torch.Tensor | None, context: torch.Tensor, layout: Layout, output_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the packed context `[B, L, d]`, to which P attends (eq. 3), and the weights or None."""
        query = self.pack_query(packed).unflatten(-1, (-1, self.pack_head_size))
        if self.tied:
            key = value = self.pack_key_value(context).unflatten(-1, (-1, self.pack_head_size))
        else:
            key = self.pack_key(context).unflatten(-1, (-1, self.pack_head_size))
            value = self.pack_value(context).unflatten(-1, (-1, self.pack_head_size))
        options = {"dropout": self.dropout.rate, "return_weights": output_weights, **layout.options()}
        result: Any = luna_pack(query, key, value, **options)
        heads, weights = result if output_weights else (result, None)
        return heads.flatten(2), weights


class LunaCausalAttention(LunaProjections):
    """Attention of every token to the tokens up to it (section 3.3, `LunarCausalAttention` of the original).

    P only determines weights of the tokens. It does not change, so that there is no projection of pack values.
    """

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.activation = config.causal_activation
        keys = ("key_value",) if self.tied else ("key", "value")
        self.add_linears(config.hidden_size, "pack_query", "pack_key", "query", *keys, "output")

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor | None,
        layout: Layout = NO_PADDING,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
        cache: LunaCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from tokens `[B, T, d]` to those before them, weighted by P `[B, L, d]` (None with a filled `cache`).

        Return `[B, T, d]` and, with `output_weights`, the unpack weights `[B, heads, T, L]`. `packed_mask` `[B, L]` is
        bool, True = keep.
        """
        state = None
        if cache is not None and cache.is_initialized:
            pack_query, state = cache.pack_query, cache.state
        else:
            pack_query = self.pack_query(packed).unflatten(-1, (-1, self.head_size))
        is_step = state is not None and hidden_states.shape[1] == 1 and not output_weights
        tokens = hidden_states[:, 0] if is_step else hidden_states  # now, so that tied keys and values are one tensor
        key, value = self.project(tokens)
        query = self.query(tokens).unflatten(-1, (-1, self.head_size))
        pack_key = self.pack_key(tokens).unflatten(-1, (-1, self.head_size))
        options: dict[str, Any] = {"activation": self.activation, "dropout": self.dropout.rate}
        options |= {"pack_mask": packed_mask, "state": state}
        if cache is not None and is_step:
            options |= {"mask": None if layout.mask is None else layout.mask[:, 0], "inplace": cache.writes_over()}
            output, following = luna_causal_attention_step(query, pack_query, pack_key, key, value, **options)
            cache.store_state(following, 1)
            return self.output(output.flatten(1)[:, None]), None
        options |= {"return_state": True, "return_weights": output_weights, **layout.options()}
        output, *weights, following = luna_causal_attention(query, pack_query, pack_key, key, value, **options)
        if cache is not None:
            if state is None:
                # In the memory order of the steps, `[B, H, L, K]`.
                pack_query = pack_query.transpose(1, 2).contiguous().transpose(1, 2)
                cache.store(pack_query=pack_query, pack_mask=packed_mask)
            cache.store_state(following, hidden_states.shape[1])
        return self.output(output.flatten(2)), weights[0] if weights else None


class LunaBlock(GradientCheckpointingLayer):
    """Base of encoder and decoder layers: attention, norms of tokens and P, and a feed-forward network.

    `attention` is the first attention of the layer. `packs` specifies whether the layer updates P. `layer_idx` is the
    row of `packed_embeddings` of the layer, unless P is contextual.
    """

    packed_layer_norm: Any

    def __init__(self, config: LunaConfig, attention: nn.Module, packs: bool, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        width, eps = config.hidden_size, config.layer_norm_eps
        self.pre_norm = config.pre_norm
        self.attention = attention
        self.attention_layer_norm = nn.LayerNorm(width, eps=eps)
        self.packed_layer_norm = nn.LayerNorm(width, eps=eps) if packs else None
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)
        self.final_layer_norm = nn.LayerNorm(width, eps=eps)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)
        self.chunk_size = config.chunk_size_feed_forward

    def before(self, norm: nn.Module, residual: torch.Tensor) -> torch.Tensor:
        """Return the input of a sub-layer, with `pre_norm` the norm of the residual."""
        return norm(residual) if self.pre_norm else residual

    def after(self, norm: nn.Module, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the residual after a sub-layer: the sum, or without `pre_norm` its norm."""
        return residual + output if self.pre_norm else norm(residual + output)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the tokens after the feed-forward network, `[B, T, d]`."""
        states = self.before(self.final_layer_norm, hidden_states)
        if self.chunk_size == 0:
            output = self.feed_forward_chunk(states)
        else:
            output = apply_chunking_to_forward(self.feed_forward_chunk, self.chunk_size, 1, states)
        return self.after(self.final_layer_norm, hidden_states, output)

    def feed_forward_chunk(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.fc2(self.activation_dropout(self.activation(self.fc1(hidden_states)))))

    def unpack_modules(self) -> list[nn.Module]:
        """Return the modules on which the tokens after this layer depend, but not P."""
        names = ("query", "key", "value", "key_value", "output")
        unpack = [getattr(self.attention, name) for name in names if hasattr(self.attention, name)]
        norms = [self.final_layer_norm, *([] if self.pre_norm else [self.attention_layer_norm])]
        return [*unpack, *norms, self.fc1, self.fc2]


class LunaLayer(LunaBlock):
    """An encoder layer (Figure 2): attention and a feed-forward network for the tokens; P has a separate norm."""

    def __init__(self, config: LunaConfig, layer_idx: int):
        super().__init__(config, LunaAttention(config), True, layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor,
        layout: Layout = NO_PADDING,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens `[B, T, d]` and P `[B, L, d]` after the layer."""
        norm, packed_norm = self.attention_layer_norm, self.packed_layer_norm
        output, packed_output, *_ = self.attention(
            self.before(norm, hidden_states),
            self.before(packed_norm, packed),
            layout=layout,
            packed_mask=packed_mask,
            output_weights=output_weights,
        )
        hidden_states = self.after(norm, hidden_states, self.dropout(output))
        packed = self.after(packed_norm, packed, self.dropout(packed_output))
        return self.feed_forward(hidden_states), packed


class LunaDecoderLayer(LunaBlock):
    """A decoder layer (section 3.3): causal attention, attention to an encoder, feed-forward network."""

    def __init__(self, config: LunaConfig, layer_idx: int):
        super().__init__(config, LunaCausalAttention(config), config.add_cross_attention, layer_idx)
        crosses = config.add_cross_attention
        self.cross_attention = LunaAttention(config) if crosses else None
        self.cross_attention_layer_norm: Any = None
        if crosses:
            self.cross_attention_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        layout: Layout = NO_PADDING,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
        encoder_layout: Layout = NO_PADDING,
        cache: LunaCacheLayer | None = None,
        cross_cache: LunaCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return tokens `[B, T, d]` and P `[B, L, d]` after the layer.

        P does not depend on the tokens. Filled caches replace it and `encoder_hidden_states` `[B, M, d]`.
        """
        norm: nn.Module = self.attention_layer_norm
        output, _ = self.attention(
            self.before(norm, hidden_states),
            packed,
            layout=layout,
            packed_mask=packed_mask,
            output_weights=output_weights,
            cache=cache,
        )
        hidden_states = self.after(norm, hidden_states, self.dropout(output))
        if self.cross_attention is not None:
            norm, packed_norm = self.cross_attention_layer_norm, self.packed_layer_norm
            output, packed_output, *_ = self.cross_attention(
                self.before(norm, hidden_states),
                None if packed is None else self.before(packed_norm, packed),
                layout=encoder_layout,
                packed_mask=packed_mask,
                output_weights=output_weights,
                encoder_hidden_states=encoder_hidden_states,
                cache=cross_cache,
            )
            hidden_states = self.after(norm, hidden_states, self.dropout(output))
            if packed is not None and packed_output is not None:
                packed = self.after(packed_norm, packed, self.dropout(packed_output))
        return self.feed_forward(hidden_states), packed


class LunaStack(nn.Module):
    """The layers of an encoder or a decoder; with `share_layers` one layer, applied `num_hidden_layers` times."""

    def __init__(self, config: LunaConfig, layer_class: type[LunaLayer | LunaDecoderLayer]):
        super().__init__()
        self.config = config
        layers = 1 if config.share_layers else config.num_hidden_layers
        self.layers: Any = nn.ModuleList(layer_class(config, index) for index in range(layers))
        if config.pre_norm:
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if not config.learns_causal_projection:
                self.packed_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False

    def packed_rows(self) -> list[int]:
        """Return the row of `packed_embeddings` of every step. It does not change if other layers are removed."""
        if self.config.share_layers:
            return list(range(self.config.num_hidden_layers))
        return [layer.layer_idx for layer in self.layers]

    def used_layers(self, x: torch.Tensor) -> Iterator[tuple[int, LunaBlock, bool]]:
        """Yield the index and layer of every step, and whether layerdrop skips it.

        With several processes, skipped layers are yielded as well, see `choose`.
        """
        probability = self.config.layerdrop if self.training else 0.0
        if probability > 0.0:
            forbid_capture(x, "layerdrop, which the host draws", "set it to 0")
        layers = [*self.layers] * (self.config.num_hidden_layers if self.config.share_layers else 1)
        for index, layer in enumerate(layers):
            dropped = probability > 0.0 and torch.rand(()).item() < probability
            if not dropped or has_peers():
                yield index, layer, dropped

    def choose(
        self, dropped: bool, before: tuple[torch.Tensor | None, ...], after: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return tokens and P `before` a layer if it is dropped, else `after` it.

        FSDP and DDP synchronize weights and gradients of every layer, but each process drops other layers. Dropped
        layers therefore run with several processes, and have gradients of 0.
        """
        drop = torch.tensor(dropped, device=after[0].device)
        pairs = zip(before, after, strict=True)
        tokens, packed = (new if old is None or new is None else torch.where(drop, old, new) for old, new in pairs)
        return cast(torch.Tensor, tokens), packed

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed_inputs: PackedStates,
        layout: Layout,
        packed_mask: torch.Tensor | None,
        output_weights: bool,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_layout: Layout = NO_PADDING,
        caches: Sequence[tuple[Any, Any]] | None = None,
    ) -> tuple[torch.Tensor, PackedStates]:
        """Return the tokens after the last layer, and P before the first layer and after each layer.

        `packed_inputs` contains one P `[B, L, d]`, or one per layer unless P is contextual. The last three arguments
        are for a decoder, with the caches of self-attention and cross-attention of each layer.
        """
        packed_states, contextual = [packed_inputs[0]], self.config.contextual_projection
        synchronized = self.training and self.config.layerdrop > 0.0 and has_peers()
        for index, layer, dropped in self.used_layers(hidden_states):
            before = (hidden_states, packed_states[-1])
            source: tuple[Any, ...] = ()
            options: dict[str, Any] = {}
            if caches is not None:
                # Positional: gradient checkpoints with `use_reentrant=True` do not differentiate keyword arguments.
                source = (encoder_hidden_states,)
                options = {"encoder_layout": encoder_layout, "cache": caches[index][0], "cross_cache": caches[index][1]}
            states = layer(
                hidden_states,
                packed_states[-1] if contextual else packed_inputs[index],
                *source,
                layout=layout,
                packed_mask=packed_mask,
                output_weights=output_weights,
                **options,
            )
            hidden_states, packed = self.choose(dropped, before, states) if synchronized else states
            packed_states.append(packed)
        return self.final_norm(hidden_states, packed_states)

    def final_norm(self, hidden_states: torch.Tensor, packed_states: PackedStates) -> tuple[torch.Tensor, PackedStates]:
        """Apply the norms after the last layer, with `pre_norm` only."""
        if self.config.pre_norm:
            hidden_states = self.layer_norm(hidden_states)
            if packed_states[-1] is not None and hasattr(self, "packed_layer_norm"):
                packed_states[-1] = self.packed_layer_norm(packed_states[-1])
        return hidden_states, packed_states

    def unread_parameters(self, tokens: bool, packed: bool) -> list[nn.Parameter]:
        """Return the parameters that do not affect any output in use.

        `tokens` and `packed` specify whether the tokens and P after the last layer are used.
        """
        config = self.config
        *earlier, last = [self.layers[0 if config.share_layers else index] for index in range(config.num_hidden_layers)]
        unread: list[nn.Module | None]
        if config.pre_norm:
            unread = [] if tokens else [self.layer_norm]
            unread += [] if packed else [getattr(self, "packed_layer_norm", None)]
        else:
            # Layer i + 1 reads the norm of P in layer i. The norm in the last layer is only used if P is an output.
            # With layerdrop, any layer can be the last.
            reads_earlier = config.contextual_projection or (packed and config.layerdrop > 0.0)
            read = [*(earlier if reads_earlier else []), *([last] if packed else [])]
            unread = [layer.packed_layer_norm for layer in self.layers if layer not in read]
        if not tokens and last not in earlier:
            unread += last.unpack_modules()
        return [parameter for module in unread if module is not None for parameter in module.parameters()]


class LunaPreTrainedModel(CommonPreTrainedModel):
    """Base of the Luna models, with the configuration and the initialization of weights."""

    config_class = LunaConfig
    config: LunaConfig
    base_model_prefix = "luna"
    cache_class, seq2seq_cache_class = LunaCache, LunaSeq2SeqCache
    _no_split_modules = ["LunaLayer", "LunaDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": LunaBlock,
        "attentions": [
            OutputRecorder(LunaAttention, index=2, layer_name="attention"),
            OutputRecorder(LunaCausalAttention, index=1),
        ],
        "cross_attentions": OutputRecorder(LunaAttention, index=2, layer_name="cross_attention"),
        "packed_attentions": OutputRecorder(LunaAttention, index=3),
    }

    @property
    def embedding_range(self) -> float:
        """Standard deviation of initial embeddings, which is 1 after `scale_embedding`."""
        return (
            self.config.hidden_size**-0.5 if self.config.scale_embedding else cast(float, self.config.initializer_range)
        )

    def unread_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that no loss of this class depends on: heads read only the tokens, unless overridden.

        A model without a head returns tokens and P, so that all its parameters are used.
        """
        body: Any = self.base_model
        if body is self:
            return ()
        if self.config.is_encoder_decoder:
            encoder = body.encoder.encoder.unread_parameters(tokens=True, packed=True)
            return [*encoder, *body.decoder.decoder.unread_parameters(tokens=True, packed=False)]
        return body.stack.unread_parameters(tokens=True, packed=False)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save the model. The saved `packed_embeddings` have one row per layer, also if layers have been removed."""
        for path, body in self.named_modules():
            if isinstance(body, LunaModel) and body.embeddings.has_projection and not body.config.contextual_projection:
                rows, count = body.stack.packed_rows(), len(body.embeddings.packed_embeddings)
                if rows != [*range(count)]:
                    name = f"{path}.embeddings.packed_embeddings".lstrip(".")
                    state_dict = self.state_dict() if state_dict is None else {**state_dict}
                    state_dict[name] = state_dict[name][rows]
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LunaEmbeddings) and module.has_projection:
            init.normal_(module.packed_embeddings, std=self.embedding_range)
        elif isinstance(module, nn.Embedding) and self.config.scale_embedding:
            init.normal_(module.weight, std=self.embedding_range)
        elif isinstance(module, ValueEmbeddings):
            init.normal_(module.weight, std=cast(float, self.config.initializer_range))
            init.zeros_(module.bias)
        clear_row(module)


def number_positions(config: LunaConfig, inputs: Inputs) -> torch.Tensor:
    """Return the position of every token in the layout, `[B or 1, T]`: the number of kept tokens before it."""
    layout, given, longest = inputs.layout, inputs.given, config.longest_input
    length = layout.sizes(given)[1] + inputs.seen if longest is not None else 0
    if inputs.position_ids is not None:
        positions = layout.gather(inputs.position_ids.expand(given.shape[:2]))
        # Positions of padding have no effect and may be invalid.
        positions = positions if layout.mask is None else positions.masked_fill(~layout.mask, 0)
    else:
        positions = layout.positions(given)
        if inputs.cache is not None and inputs.seen:
            positions = positions + inputs.cache.layers[0].tensors["count"][:, None]
            if layout.mask is not None:  # padding after the last learned position has none
                positions = positions.masked_fill(~layout.mask, 0)
    # Padding has no positions. Programs contain no branch on values.
    if longest is not None and length > longest and (inputs.model_cache is not None or mode() < COMPILED):
        forbid_capture(positions, f"{length} positions of a model that has learned {longest}", "shorten the input")
        if inputs.position_ids is None and not inputs.seen:
            counts = layout.counts()
            length = length if counts is None else min(length, int(counts.max()))
        else:
            length = min(length, int(positions.max()) + 1)
    if inputs.position_ids is not None or (longest is not None and length > longest):
        check_positions(longest, inputs.position_ids, positions, length)
    return positions


def check_positions(
    longest: int | None, position_ids: torch.Tensor | None, positions: torch.Tensor, length: int
) -> None:
    """Raise `ValueError` for a sequence that is too long, and on a CPU for `position_ids` without a learned position.

    `length` is the length of the longest sequence, and `longest` the number of learned positions, or None.
    """
    if longest is not None and length > longest:
        raise ValueError(
            f"the sequence length {length} exceeds the {longest} learned positions of the model; truncate the input "
            "or train with a larger `max_position_embeddings` (`max_target_positions` of a decoder)"
        )
    if position_ids is not None and can_look(positions):
        first, last = (x.item() for x in positions.aminmax())
        if first < 0 or (longest is not None and last >= longest):
            limit = "0" if longest is None else f"0 and less than the {longest} of `max_position_embeddings`"
            raise ValueError(f"`position_ids` are from {first} to {last}; they must be at least {limit}")


def read_packed(
    config: LunaConfig, inputs: Inputs, states: torch.Tensor | None, mask: torch.Tensor | None
) -> Packed | None:
    """Return P for every layer, None with a filled cache, and the bool mask of its rows; None = P is learned."""
    layers, width, cache = config.num_hidden_layers, config.hidden_size, inputs.cache
    if cache is not None and inputs.seen:
        kept = cache.layers[0].tensors
        check_packed(states, mask, (inputs.given.shape[0], kept["key_mean"].shape[3], width))
        return [None] * layers, kept.get("pack_mask")
    if states is None:
        if mask is not None:
            raise ValueError("`packed_states` is missing; pass it with its `packed_mask`, or neither")
        if config.add_cross_attention:
            raise ValueError("`packed_states` is missing; a decoder with `add_cross_attention=True` requires it")
        return None
    check_packed(states, mask, (inputs.layout.sizes(inputs.given)[0], "rows", width))
    mask = to_bool_mask("packed_mask", mask, drop_full=True)
    if mask is not None:  # unused rows may contain NaN, and pass through the layers
        states = states.masked_fill(~mask[..., None] & ~is_sound(states), 0.0)
    return [states] * layers, mask


def check_packed(states: torch.Tensor | None, mask: torch.Tensor | None, shape: tuple[int, int | str, int]) -> None:
    """Raise `ValueError` unless `packed_states` and its mask have this shape.

    If the number of rows in `shape` is a name, any number is accepted.
    """
    batch, rows, width = shape
    if states is not None:
        given = list(states.shape)
        if len(given) != 3 or given[::2] != [batch, width] or rows not in ("rows", given[1]):
            raise ValueError(f"`packed_states` must have the shape [{batch}, {rows}, {width}], got {given}")
        rows = given[1]
    if mask is not None and tuple(mask.shape) != (batch, rows):
        raise ValueError(f"`packed_mask` must have the shape [{batch}, {rows}] of P, got {list(mask.shape)}")


def select_layers(packed: list[torch.Tensor], options: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Return P of the layers that `output_hidden_states` selects, and None for the others, as transformers does."""
    selected, count = options.get("output_hidden_states"), len(packed)
    if selected is None or isinstance(selected, bool):
        return tuple(packed)
    indices = [selected] if isinstance(selected, int) else selected
    kept = {index % count for index in indices if -count <= index < count}
    return tuple(states if index in kept else None for index, states in enumerate(packed))


class LunaModel(BodyMixin, LunaPreTrainedModel):
    """Luna without a head: the encoder, or with `is_decoder` a decoder."""

    embeddings_name = "embeddings"
    own_options = frozenset({"output_packed_attentions"})
    weight_options: tuple[str, ...] = ("output_attentions", "output_packed_attentions")
    packs = True
    closes_gaps = False

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.built_with["first_position"] = config.first_position
        self.embeddings = LunaEmbeddings(config)
        if config.is_decoder:
            self.decoder = LunaStack(config, LunaDecoderLayer)
        else:
            self.encoder = LunaStack(config, LunaLayer)
        self.post_init()

    @property
    def token_types(self) -> int:
        return self.config.type_vocab_size

    @property
    def stack(self) -> LunaStack:
        """The layers."""
        return self.decoder if self.config.is_decoder else self.encoder

    @property
    def input_width(self) -> int:
        return cast(int, self.config.embedding_size)

    @accept_past_key_values
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        input_values: torch.FloatTensor | None = None,
        packed_states: torch.FloatTensor | None = None,
        packed_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: LunaCache | LunaSeq2SeqCache | None = None,
        use_cache: bool | None = None,
        # Not named `**kwargs`: `generate` would forward decoder arguments to the encoder.
        **options: Unpack[ModelKwargs],
    ) -> LunaModelOutput:
        """Encode, or decode, a batch of B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens (`input_type="tokens"`).
            attention_mask: `[B, T]`, 1 = keep, 0 = drop; None = all positions, with `input_ids` all that are not
                `pad_token_id`. Dropped inputs have no effect, even if they are NaN.
            token_type_ids: `[B, T]`, less than `type_vocab_size`, without which only 0 is supported; None = all 0.
            position_ids: `[B, T]`, starting at 0; None = the number of kept tokens before each token. If they do not
                increase within a row and there is no `attention_mask`, the batch is padding-free: S sequences in one
                row, as returned by `DataCollatorWithFlattening`. It has one P per sequence, `[S, L, d]`, and no cache.
            inputs_embeds: `[B, T, d]` embeddings instead of tokens or values; `[B, T, E]` with `embedding_size` E.
            input_values: `[B, T]` real numbers (`input_type="values"`), `[B, T, C]` with `num_channels=C`.
            packed_states: `[B, L, d]`, P instead of the learned one, such as the `packed_last_hidden_state` of the
                previous segment of a document, of an encoder, or of a `LunaModel` for a prefix (section 3.3). An
                encoder returns it unchanged for a sequence without a token.
            packed_mask: `[B, L]`, 1 = a row of `packed_states` that is in use; None = all.
            encoder_hidden_states: `[B, M, d]`, output of an encoder; `add_cross_attention` only.
            encoder_attention_mask: `[B, M]`, 1 = keep; None = all.
            cache: cache of the previous positions, which is updated in place; `is_decoder` only. It contains
                the output of the encoder. `attention_mask` covers the T positions, or these and all before them.
            use_cache: return the cache; `is_decoder` only. None = `config.use_cache`, except in training.
            options: `output_hidden_states`, `output_attentions`, `output_packed_attentions`, `return_dict`; for
                padding-free batches also `cu_seq_lens_q` `[S + 1]` and `max_length_q` (`cu_seq_lens_k` and
                `max_length_k` must be the same), or `seq_idx` `[B, T]`.

        Returns:
            `LunaModelOutput`.

        Raises:
            ValueError: Not exactly one kind of input, an empty batch, an invalid mask, positions below 0 or above the
                learned ones, a cache of another model or batch, or an unsupported argument.
        """
        inputs = prepare(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            model_cache=cache,
            use_cache=use_cache,
            options=options,
        )
        layout = inputs.layout
        passed: Packed | None = None
        if packed_states is not None or packed_mask is not None or self.config.is_decoder:
            passed = read_packed(self.config, inputs, packed_states, packed_mask)
        positions = number_positions(self.config, inputs)
        # One call: FSDP and offloading load the weights of a module only during its `forward`.
        types = None if inputs.token_type_ids is None else layout.gather(inputs.token_type_ids)
        hidden_states, learned = self.embeddings(embed(self, inputs), layout, positions, passed is None, types)
        packed, packed_mask = learned if passed is None else passed
        stack = self.stack
        if passed is None and not self.config.contextual_projection:
            packed = [packed[row] for row in stack.packed_rows()]
        caches = None
        if self.config.is_decoder:
            caches = layer_caches(inputs.cache, inputs.cross_cache, self.config.num_hidden_layers)
        hidden_states, packed = stack(
            hidden_states,
            packed,
            layout=layout,
            packed_mask=packed_mask,
            output_weights=inputs.output_weights,
            encoder_hidden_states=inputs.encoder_hidden_states,
            encoder_layout=inputs.encoder_layout,
            caches=caches,
        )
        if caches is None and packed_states is not None and (counts := layout.counts()) is not None:
            packed[-1] = torch.where(counts[..., None] > 0, packed[-1], packed_states)  # empty sequences
        returns_packed = inputs.output_states and packed[-1] is not None
        return LunaModelOutput(
            last_hidden_state=scatter_states(inputs, hidden_states),
            packed_last_hidden_state=packed[-1],
            packed_mask=None if packed_mask is None else packed_mask.long(),
            attention_mask=None if inputs.mask is None else inputs.mask.long(),
            **cache_field(inputs.model_cache),
            packed_hidden_states=select_layers(packed, options) if returns_packed else None,
        )


LunaPreTrainedModel.body_class = LunaModel


@dataclass
class LunaPackedOutputs:
    """P and the attention that packs it, of each layer, in the outputs of heads; see `LunaModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LunaMaskedLMOutput(LunaPackedOutputs, MaskedLMOutput):
    """`MaskedLMOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaSequenceClassifierOutput(LunaPackedOutputs, SequenceClassifierOutput):
    """`SequenceClassifierOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaMultipleChoiceOutput(LunaPackedOutputs, MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaTokenClassifierOutput(LunaPackedOutputs, TokenClassifierOutput):
    """`TokenClassifierOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaQuestionAnsweringOutput(LunaPackedOutputs, QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with `LunaPackedOutputs`."""


class LunaLMHead(nn.Module):
    """Masked-LM head: dense, activation, LayerNorm, decoder."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        width = cast(int, config.embedding_size)
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.layer_norm(self.activation(self.dense(hidden_states))))


class LunaForMaskedLM(GenericForMaskedLM, LunaPreTrainedModel):
    """Luna with a masked-language-modeling head (`luna_bert` of the original code)."""

    _tied_weights_keys = {"lm_head.decoder.weight": "luna.embeddings.word_embeddings.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^pooler\.", r"^classifier\."]
    output_class = LunaMaskedLMOutput
    output_layer = "lm_head.decoder"

    def make_head(self, config: LunaConfig) -> None:
        self.lm_head = LunaLMHead(config)


class LunaPoolerAttention(nn.Module):
    """Multi-head attention of one query to the packed sequence."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, query: torch.Tensor, packed: torch.Tensor, packed_mask: torch.Tensor | None) -> torch.Tensor:
        query = self.q_proj(query)[:, None].unflatten(-1, (self.num_heads, -1))
        key, value = (proj(packed).unflatten(-1, (self.num_heads, -1)) for proj in (self.k_proj, self.v_proj))
        attended: Any = luna_unpack(query, key, value, packed_mask)
        return self.out_proj(attended.flatten(2)[:, 0])


class LunaPooler(nn.Module):
    """Sequence vector `[B, d]` of tokens or packed sequence, by `config.pooling` (heads of `luna_bert` and LRA)."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.pooling = config.pooling
        self.reads_tokens = config.pooling not in ("packed_max", "packed_mean")
        self.reads_packed = config.pooling.startswith("packed")
        self.pool_padding = config.pool_padding
        if self.pooling == "packed_max":
            self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        elif self.pooling == "packed_attention":
            self.attention = LunaPoolerAttention(config)
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, outputs: Any) -> torch.Tensor:
        """Return `[B, d]` of a `LunaModelOutput`."""
        tokens, packed, mask = outputs.last_hidden_state, outputs.packed_last_hidden_state, kept_positions(outputs)
        packed_mask = None if outputs.packed_mask is None else outputs.packed_mask.bool()
        if self.pooling in POOLINGS:
            return POOLINGS[self.pooling](tokens, None if self.pool_padding else mask)
        if self.pooling == "packed_mean":
            if self.pool_padding and packed_mask is not None:
                # The original averages over the rows that the longest sequence of the batch uses.
                packed_mask = packed_mask.any(dim=0, keepdim=True)
            return masked_mean(packed, packed_mask)
        if self.pooling == "packed_max":
            packed = self.dense(packed)
            if packed_mask is None:
                return packed.amax(dim=1)
            packed = packed.masked_fill(~packed_mask[..., None], torch.finfo(packed.dtype).min).amax(dim=1)
            return packed.masked_fill(~packed_mask.any(dim=1, keepdim=True), 0.0)
        return self.layer_norm(self.attention(first_token(tokens, mask), packed, packed_mask))


class LunaPooledHead(PooledHead):
    """Base of the heads for sequences, which read the outputs by `config.pooling`."""

    pooler: LunaPooler
    luna: LunaModel
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def make_head(self, config: LunaConfig) -> None:
        self.pooler = LunaPooler(config)
        super().make_head(config)

    def summarize(self, outputs: LunaModelOutput) -> torch.Tensor:
        return self.pooler(outputs)

    def unread_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that no loss depends on."""
        return self.luna.stack.unread_parameters(self.pooler.reads_tokens, self.pooler.reads_packed)


class LunaForSequenceClassification(LunaPooledHead, GenericForSequenceClassification, LunaPreTrainedModel):
    """Luna with a sequence classification or regression head, which reads the outputs by `config.pooling`."""

    output_class = LunaSequenceClassifierOutput


class LunaForSequencePairClassification(LunaPooledHead, GenericForSequencePairClassification, LunaPreTrainedModel):
    """Two towers with one set of weights, classified together (LRA Retrieval; paper section 4.1)."""

    output_class = LunaSequenceClassifierOutput
    unsupported_options = {"position_ids": "the positions of pairs are counted from the attention masks"}


class LunaForMultipleChoice(LunaPooledHead, GenericForMultipleChoice, LunaPreTrainedModel):
    """Luna with one score for every option (paper section 4.3: RACE, CommonsenseQA)."""

    output_class = LunaMultipleChoiceOutput


class LunaForTokenClassification(GenericForTokenClassification, LunaPreTrainedModel):
    """Luna with a label for every token."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    output_class = LunaTokenClassifierOutput


class LunaForQuestionAnswering(GenericForQuestionAnswering, LunaPreTrainedModel):
    """Luna with start and end scores for extractive question answering."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    output_class = LunaQuestionAnsweringOutput


@dataclass
class LunaCausalLMOutput(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with the P of each layer, see `LunaModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LunaSeq2SeqModelOutput(Seq2SeqModelOutput):
    """`Seq2SeqModelOutput` of an encoder-decoder with S source and T target positions, and what Luna adds.

    Args:
        encoder_packed_last_hidden_state: `[B, L, d]`, P after the encoder.
        packed_last_hidden_state: `[B, L, d]`, P after the decoder; None with a filled cache.
        packed_mask: `[B, L]`, 1 = a row of both that is in use; None = all, or nothing was encoded.
        encoder_packed_hidden_states, packed_hidden_states: with `output_hidden_states=True`, P before the first layer
            and after each layer of encoder and decoder.
        cross_attentions, decoder_attentions, encoder_attentions: with `output_attentions=True`, weights over the rows
            of P, not over positions: `[B, heads, T, L]`, of the encoder `[B, heads, S, L]`.
        cross_packed_attentions: with `output_packed_attentions=True`, the pack weights of the source,
            `[B, pack heads, L, S]`; None with a filled cache.
    """

    packed_last_hidden_state: torch.FloatTensor | None = None
    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed_mask: torch.LongTensor | None = None
    encoder_packed_last_hidden_state: torch.FloatTensor | None = None
    encoder_packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    cross_packed_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LunaSeq2SeqLMOutput(Seq2SeqLMOutput):
    """`Seq2SeqLMOutput` with the recorded states and attention weights of P, as in `LunaSeq2SeqModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    encoder_packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    cross_packed_attentions: tuple[torch.FloatTensor, ...] | None = None


class LunaForCausalLM(GenericForCausalLM, StateGenerationMixin, LunaPreTrainedModel):
    """Luna with a language-modeling head; generates at constant memory. Requires `is_decoder=True`.

    P is a parameter of each layer (section 3.3), unless `packed_states` is given, such as the
    `packed_last_hidden_state` of a `LunaModel` for a prefix.
    """

    _tied_weights_keys = {"lm_head.weight": "luna.embeddings.word_embeddings.weight"}
    output_class = LunaCausalLMOutput

    def check_config(self, config: LunaConfig) -> None:
        if not config.learns_causal_projection:
            raise ValueError(
                "LunaForCausalLM requires a configuration with is_decoder=True and add_cross_attention=False, got "
                f"{config.is_decoder} and {config.add_cross_attention}; for an encoder and a decoder, use "
                "LunaForConditionalGeneration"
            )

    @accept_past_key_values
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        packed_states: torch.FloatTensor | None = None,
        packed_mask: torch.Tensor | None = None,
        cache: LunaCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[HeadKwargs],
    ) -> LunaCausalLMOutput:
        """Predict the next token of each position from the inputs of `LunaModel.forward`.

        `labels` `[B, T]` are token ids, usually `input_ids`; the loss shifts them and ignores -100. The keyword
        argument `shift_labels` `[B, T]` replaces them: the token that follows each position, including the last.

        `logits` are `[B, T, vocab_size]`, restricted to the last `logits_to_keep` positions or to the positions in
        `logits_to_keep` if it is a tensor.

        Raises:
            ValueError: As in `LunaModel.forward`, and if labels do not match the positions of `logits_to_keep`.
        """
        return self.predict_next(
            labels,
            logits_to_keep,
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            packed_states=packed_states,
            packed_mask=packed_mask,
            cache=cache,
            use_cache=use_cache,
        )


class LunaSeq2SeqModel(Seq2SeqBody, LunaPreTrainedModel):
    """Luna encoder-decoder without a head. The layers of the decoder continue from the P of the encoder.

    Further keyword arguments of `forward` are `decoder_position_ids` `[B, T]`, which start at 0, and
    `output_packed_attentions`. If `encoder_outputs` is a tuple, it contains
    `(token states, P, P mask, token mask)`; one or both masks can be omitted, first the P mask.
    """

    config_class = LunaSeq2SeqConfig
    _tied_weights_keys = {"decoder.embeddings.word_embeddings.weight": "encoder.embeddings.word_embeddings.weight"}
    encoder_output_class = LunaModelOutput
    body_output_class = LunaSeq2SeqModelOutput

    def read_outputs(self, outputs: ModelOutput | tuple[torch.Tensor, ...] | None) -> LunaModelOutput | None:
        if outputs is None or isinstance(outputs, LunaModelOutput):
            return outputs
        states = [value for value in outputs if isinstance(value, torch.Tensor)]
        if not 2 <= len(states) <= 4:
            raise ValueError(
                "`encoder_outputs` must be the LunaModelOutput of the encoder, or a tuple with the states of the "
                f"tokens and P, got a {type(outputs).__name__} with {len(states)} tensors"
            )
        names = ["last_hidden_state", "packed_last_hidden_state", "packed_mask", "attention_mask"]
        if len(states) == 3:
            names.remove("packed_mask")
        named: dict[str, Any] = dict(zip(names, states, strict=False))
        return LunaModelOutput(**named)

    def decoder_inputs(self, encoded: LunaModelOutput, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "position_ids": options.pop("decoder_position_ids", None),
            "packed_states": encoded.packed_last_hidden_state,
            "packed_mask": encoded.packed_mask,
        }

    def make_output(self, encoded: LunaModelOutput, decoded: LunaModelOutput, **fields: Any) -> Seq2SeqModelOutput:
        return super().make_output(
            encoded,
            decoded,
            packed_last_hidden_state=decoded.packed_last_hidden_state,
            packed_hidden_states=decoded.packed_hidden_states,
            packed_mask=encoded.packed_mask,
            encoder_packed_last_hidden_state=encoded.packed_last_hidden_state,
            encoder_packed_hidden_states=encoded.packed_hidden_states,
            cross_packed_attentions=decoded.packed_attentions,
            **fields,
        )


class LunaForConditionalGeneration(Seq2SeqLM, Seq2SeqGenerationMixin, LunaPreTrainedModel):
    """Luna encoder-decoder with a language-modeling head, for translation and other sequence-to-sequence tasks."""

    config_class = LunaSeq2SeqConfig
    body_class = LunaSeq2SeqModel
    _tied_weights_keys = {"lm_head.weight": "luna.decoder.embeddings.word_embeddings.weight"}
    output_class = LunaSeq2SeqLMOutput


__all__ = [
    "LunaCache",
    "LunaForCausalLM",
    "LunaForConditionalGeneration",
    "LunaForMaskedLM",
    "LunaForMultipleChoice",
    "LunaForQuestionAnswering",
    "LunaForSequenceClassification",
    "LunaForSequencePairClassification",
    "LunaForTokenClassification",
    "LunaModel",
    "LunaPreTrainedModel",
    "LunaSeq2SeqCache",
    "LunaSeq2SeqModel",
]
