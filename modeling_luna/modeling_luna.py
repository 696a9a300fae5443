"""Luna: Linear Unified Nested Attention (Ma et al. 2021, arXiv 2106.01540).

Attention to a context of length n is split in two: a short *packed* sequence P of l rows attends to the context (pack),
and every token attends to the l rows that came out (unpack). Time and memory are linear in n. P is carried from layer
to layer beside the tokens. A decoder attends to the tokens so far through sums over them (section 3.3). From top to
bottom: outputs, embeddings, attention, causal attention, layers, encoder, decoder, model. The heads are in
`heads_luna.py`, language models and translation in `generation_luna.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.pytorch_utils import apply_chunking_to_forward
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import LunaCausalState, luna_causal_attention, luna_pack, luna_unpack
from luna_mega.kernels.luna_attention.reference import attend as attend_with_weights
from luna_mega.kernels.luna_causal_attention.reference import attend_with_weights as attend_causally_with_weights
from luna_mega.kernels.masks import drop_if_full
from luna_mega.kernels.varlen import PACKED_BATCH, Sequences, as_options, find_packing, locate
from luna_mega.modeling_common.cache import begin_cache
from luna_mega.modeling_luna.cache_luna import LunaCache, LunaCacheLayer, LunaSeq2SeqCache
from luna_mega.modeling_luna.configuration_luna import LunaConfig


@dataclass
class LunaModelOutput(ModelOutput):
    """Output of `LunaModel`. B sequences of T positions, L = min(l, T) rows of P, width d, N layers.

    Args:
        last_hidden_state: `[B, T, d]`.
        packed_last_hidden_state: `[B, L, d]`; rows that `packed_mask` excludes are meaningless.
        packed_mask: `[B, L]`, 1 = a row of P that is in use; None = all are.
        attention_mask: `[B, T]`, 1 = a position that was kept; None = all were. Not set by a decoder.
        past_key_values: of a decoder, with `use_cache`.
        hidden_states, packed_hidden_states: with `output_hidden_states=True`, N + 1 tensors each, the embeddings first.
        attentions: with `output_attentions=True`, the unpack weights of every layer, `[B, heads, T, L]`.
        cross_attentions: the same of a decoder's attention to the encoder.
        packed_attentions: with `output_packed_attentions=True`, the pack weights, `[B, pack heads, L, T]`; of a decoder
            those over the encoder's positions, where it packs them.
    """

    last_hidden_state: torch.FloatTensor | None = None
    packed_last_hidden_state: torch.FloatTensor | None = None
    packed_mask: torch.LongTensor | None = None
    attention_mask: torch.LongTensor | None = None
    past_key_values: LunaCache | LunaSeq2SeqCache | None = None
    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    cross_attentions: tuple[torch.FloatTensor, ...] | None = None
    packed_attentions: tuple[torch.FloatTensor, ...] | None = None

    def recorded(self) -> dict[str, tuple[torch.FloatTensor, ...] | None]:
        """What was recorded on request, for the output of a head."""
        names = ("hidden_states", "attentions", "packed_hidden_states", "packed_attentions")
        return {name: getattr(self, name) for name in names}


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Sinusoids of positions `[...]`, `[..., width]` in float32: sines, then cosines, as in fairseq."""
    half = width // 2
    index = torch.arange(half, device=positions.device, dtype=torch.float32)
    angle = positions[..., None].float() * torch.exp(index * (-math.log(10000.0) / (half - 1)))
    return nn.functional.pad(torch.cat([angle.sin(), angle.cos()], dim=-1), (0, width % 2))


class LunaValueEmbeddings(nn.Module):
    """A real number x becomes x * weight + bias, `[B, T]` to `[B, T, d]` (LRA pixels)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, values[..., None].to(self.weight.dtype), self.weight)


class LunaEmbeddings(nn.Module):
    """Tokens or values plus positions, and the initial packed sequence P."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        if config.input_type == "tokens":
            self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        else:
            self.value_embeddings = LunaValueEmbeddings(width)
        if config.position_embedding_type == "learned":
            rows = config.max_position_embeddings + config.position_offset
            padding_row = config.position_offset - 1 if config.position_offset else None
            self.position_embeddings = nn.Embedding(rows, width, padding_idx=padding_row)
        self.has_projection = not config.add_cross_attention  # else P comes from the encoder
        if self.has_projection:
            layers = () if config.contextual_projection else (config.num_hidden_layers,)
            self.packed_embeddings = nn.Parameter(torch.empty(*layers, config.projection_length, width))
        if config.embedding_norm:
            self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
            if self.has_projection:
                self.packed_layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.word_dropout = nn.Dropout(config.word_dropout)
        self.scale = math.sqrt(width) if config.scale_embedding else 1.0

    def forward(
        self, inputs_embeds: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """`[B, T, d]` embeddings without positions -> `[B, T, d]`. `mask` is `[B, T]` bool, True = keep; `position_ids`
        `[B or 1, T]`, the first token at 0."""
        hidden_states = inputs_embeds * self.scale
        if self.training and self.config.word_dropout:
            hidden_states = hidden_states * self.word_dropout(hidden_states.new_ones((*hidden_states.shape[:2], 1)))
        if self.config.position_embedding_type != "none":
            hidden_states = hidden_states + self.positions(position_ids).to(hidden_states.dtype)
        if self.config.embedding_norm:
            hidden_states = self.layer_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states if mask is None else hidden_states.masked_fill(~mask[..., None], 0.0)

    def positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Position embeddings, `[B or 1, T, d]`."""
        position_ids = position_ids + self.config.position_offset
        if self.config.position_embedding_type == "learned":
            return self.position_embeddings(position_ids)
        return sinusoids(position_ids, self.config.hidden_size)

    def packed(
        self, inputs_embeds: torch.Tensor, mask: torch.Tensor | Sequences | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The initial P `[B, L, d]` (one tensor, or one a layer where P is not contextual), and its mask `[B, L]`.

        P is cut to min(l, T) rows, and of those each sequence uses as many as it has tokens. T is known to the host, so
        the cut costs no synchronisation; the mask does the rest. An exported program serves every T: no cut."""
        batch, length, width = inputs_embeds.shape
        count = None
        if isinstance(mask, Sequences):
            batch, length, count = len(mask.cu_seqlens) - 1, mask.max_seqlen, mask.cu_seqlens.diff()[:, None]
        elif mask is not None:
            count = mask.sum(dim=1, keepdim=True)
        packed = self.packed_embeddings
        packed_mask = None
        if self.config.dynamic_projection_length:
            if not torch.compiler.is_exporting():
                packed = packed[..., :length, :]
            elif count is None:
                count = inputs_embeds.new_ones((batch, length), dtype=torch.long).sum(dim=1, keepdim=True)
            if count is not None:
                packed_mask = torch.arange(packed.shape[-2], device=count.device) < count
        packed = packed * self.scale
        if self.config.position_embedding_type == "sinusoidal":
            rows = torch.arange(packed.shape[-2], device=packed.device)
            packed = packed + sinusoids(rows, width).to(packed.dtype)
        if self.config.embedding_norm:
            packed = self.packed_layer_norm(packed)
        layers = [packed] if self.config.contextual_projection else packed.unbind()
        # Expanded before dropout: every sequence draws a mask of its own.
        layers = [self.dropout(rows.expand(batch, -1, -1)) for rows in layers]
        if packed_mask is not None:
            layers = [rows.masked_fill(~packed_mask[..., None], 0.0) for rows in layers]
        return layers, packed_mask


class LunaAttention(nn.Module):
    """Pack and unpack attention with its projections (section 3.1, `LunarMultiheadAttention` of the original)."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.num_pack_heads = config.num_pack_attention_heads
        self.dropout = config.attention_dropout
        self.pack_query = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.tied = config.tie_key_value
        if self.tied:
            self.pack_key_value = nn.Linear(width, width)
            self.key_value = nn.Linear(width, width)
        else:
            self.pack_key, self.pack_value = nn.Linear(width, width), nn.Linear(width, width)
            self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def context_key_value(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, M, d]` -> pack key and value, `[B, M, pack heads, K]`."""
        if self.tied:
            key = _split(self.pack_key_value(context), self.num_pack_heads)
            return key, key
        key, value = self.pack_key(context), self.pack_value(context)
        return _split(key, self.num_pack_heads), _split(value, self.num_pack_heads)

    def packed_key_value(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed context `[B, L, pack heads, K]` -> unpack key and value, `[B, L, heads, K]`."""
        packed = packed.flatten(2)
        if self.tied:
            key = _split(self.key_value(packed), self.num_heads)
            return key, key
        return _split(self.key(packed), self.num_heads), _split(self.value(packed), self.num_heads)

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor | None,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
        context: torch.Tensor | None = None,
        past: LunaCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Queries `[B, T, d]` attend through P `[B, L, d]` to the context `[B, M, d]` (None = the queries themselves).

        Returns the output `[B, T, d]`, the packed context `[B, L, d]`, and with `output_weights` the unpack weights
        `[B, heads, T, L]` and pack weights `[B, pack heads, L, M]` (else None). `mask` `[B, M]` and `packed_mask` `[B,
        L]` are bool, True = keep; with `Sequences` for a mask queries and context are laid end to end. With a filled
        `past` the context is packed already: P, context and what was packed of it are None.
        """
        packed_context = pack_weights = None
        unpack_options = {"mask": packed_mask} | (as_options(mask) if isinstance(mask, Sequences) else {})
        if past is None or not past.is_initialized:
            pack_query = _split(self.pack_query(packed), self.num_pack_heads)
            context_key_value = self.context_key_value(hidden_states if context is None else context)
            packed_context, pack_weights = self.attend(
                luna_pack, pack_query, *context_key_value, output_weights, **as_options(mask)
            )
            key, value = self.packed_key_value(packed_context)
            packed_context = packed_context.flatten(2)
            if past is not None:
                past.store(key.shape[1], key=key, value=value)
        else:
            key, value = past.tensors["key"], past.tensors["value"]
        query = _split(self.query(hidden_states), self.num_heads)
        output, weights = self.attend(luna_unpack, query, key, value, output_weights, **unpack_options)
        return self.output(output.flatten(2)), packed_context, weights, pack_weights

    def attend(self, op, query, key, value, output_weights, **options):
        """Attention by `op` and None, or step by step with the weights."""
        dropout = self.dropout if self.training else 0.0
        if output_weights:
            return attend_with_weights(query, key, value, options["mask"], query.shape[-1] ** -0.5, dropout)
        return op(query, key, value, dropout=dropout, **options), None


def _split(projected: torch.Tensor, heads: int) -> torch.Tensor:
    return projected.unflatten(-1, (heads, -1))


class LunaCausalAttention(nn.Module):
    """Attention of every token to those up to it (section 3.3, `LunarCausalAttention` of the original).

    P only weighs the tokens: nothing is packed into it, and of the pack projections there is one for keys alone.
    """

    def __init__(self, config: LunaConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.activation = config.causal_activation
        self.dropout = config.attention_dropout
        self.pack_query = nn.Linear(width, width)
        self.pack_key = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.tied = config.tie_key_value
        if self.tied:
            self.key_value = nn.Linear(width, width)
        else:
            self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor | None,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
        past: LunaCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[B, T, d]` and P `[B, L, d]` (None with a filled `past`) -> `[B, T, d]`, and with
        `output_weights` the unpack weights `[B, heads, T, L]`. Masks `[B, T]` and `[B, L]` are bool, True = keep."""
        state = None
        if past is not None and past.is_initialized:
            pack_query = past.tensors["pack_query"]
            state = LunaCausalState(*(past.tensors[name] for name in LunaCausalState._fields))
        else:
            pack_query = _split(self.pack_query(packed), self.num_heads)
        if self.tied:
            key = value = _split(self.key_value(hidden_states), self.num_heads)
        else:
            key, value = (_split(linear(hidden_states), self.num_heads) for linear in (self.key, self.value))
        query, pack_key = (_split(linear(hidden_states), self.num_heads) for linear in (self.query, self.pack_key))
        inputs = (query, pack_query, pack_key, key, value)
        dropout, weights = self.dropout if self.training else 0.0, None
        if output_weights:
            output, weights, state = attend_causally_with_weights(
                *inputs, mask, packed_mask, self.activation, state, dropout
            )
        else:
            options = {"pack_mask": packed_mask, "activation": self.activation, "state": state, **as_options(mask)}
            output, state = luna_causal_attention(*inputs, **options, return_state=True, dropout=dropout)
        if past is not None:
            past.store(hidden_states.shape[1], pack_query=pack_query, pack_mask=packed_mask, **state._asdict())
        return self.output(output.flatten(2)), weights


class LunaLayer(GradientCheckpointingLayer):
    """One Luna layer (Figure 2): attention, then a feed-forward network for the tokens; P has a norm of its own."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.pre_norm = config.pre_norm
        self.attention = LunaAttention(config)
        self.attention_layer_norm = nn.LayerNorm(width, eps=eps)
        self.packed_layer_norm = nn.LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)
        self.final_layer_norm = nn.LayerNorm(width, eps=eps)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.chunk_size = config.chunk_size_feed_forward

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `[B, T, d]` and P `[B, L, d]` -> the same of the next layer."""
        if self.pre_norm:
            output, packed_output, *_ = self.attention(
                self.attention_layer_norm(hidden_states),
                self.packed_layer_norm(packed),
                mask,
                packed_mask,
                output_weights,
            )
            hidden_states = hidden_states + self.dropout(output)
            packed = packed + self.dropout(packed_output)
            return hidden_states + self.feed_forward(self.final_layer_norm(hidden_states)), packed
        output, packed_output, *_ = self.attention(hidden_states, packed, mask, packed_mask, output_weights)
        hidden_states = self.attention_layer_norm(hidden_states + self.dropout(output))
        packed = self.packed_layer_norm(packed + self.dropout(packed_output))
        return self.final_layer_norm(hidden_states + self.feed_forward(hidden_states)), packed

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return apply_chunking_to_forward(self.feed_forward_chunk, self.chunk_size, 1, hidden_states)

    def feed_forward_chunk(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.fc2(self.activation_dropout(self.activation(self.fc1(hidden_states)))))


class LunaEncoder(nn.Module):
    """The stack of layers; with `share_layers` one layer, applied `num_hidden_layers` times."""

    layer_class = LunaLayer

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.config = config
        layers = 1 if config.share_layers else config.num_hidden_layers
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(layers))
        if config.pre_norm:
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if not config.learns_causal_projection:
                self.packed_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: list[torch.Tensor],
        mask: torch.Tensor | None,
        packed_mask: torch.Tensor | None,
        output_weights: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`packed` has one tensor `[B, L, d]`, or one for every layer where P is not contextual. Returns the tokens
        after the last layer and P as it was given to the first layer and left each layer."""
        packed_states = [packed[0]]
        for index, layer in self.used_layers():
            rows = packed_states[-1] if self.config.contextual_projection else packed[index]
            hidden_states, rows = layer(hidden_states, rows, mask, packed_mask, output_weights)
            packed_states.append(rows)
        return self.final_norm(hidden_states, packed_states)

    def used_layers(self) -> Iterator[tuple[int, LunaLayer]]:
        """The index and the layer of every step; layerdrop leaves some out."""
        for index in range(self.config.num_hidden_layers):
            if not (self.training and self.config.layerdrop and torch.rand(()) < self.config.layerdrop):
                yield index, self.layers[0 if self.config.share_layers else index]

    def final_norm(self, hidden_states, packed_states):
        """The norms behind the last layer, where every layer begins with one."""
        if self.config.pre_norm:
            hidden_states = self.layer_norm(hidden_states)
            if packed_states[-1] is not None and not self.config.learns_causal_projection:
                packed_states[-1] = self.packed_layer_norm(packed_states[-1])
        return hidden_states, packed_states


class LunaDecoderLayer(LunaLayer):
    """Causal attention, with `add_cross_attention` attention to an encoder, a feed-forward network (section 3.3)."""

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = LunaCausalAttention(config)
        self.cross_attention = LunaAttention(config) if config.add_cross_attention else None
        self.cross_attention_layer_norm = nn.LayerNorm(width, eps=eps) if config.add_cross_attention else None
        if not config.add_cross_attention:
            self.packed_layer_norm = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: torch.Tensor | None,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        past: LunaCacheLayer | None = None,
        cross_past: LunaCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[B, T, d]` and P `[B, L, d]` -> the same of the next layer. P does not depend on the tokens, so that
        filled caches take its place, and that of the encoder's output `context` `[B, M, d]`."""
        norm = self.attention_layer_norm
        output, _ = self.attention(
            norm(hidden_states) if self.pre_norm else hidden_states, packed, mask, packed_mask, output_weights, past
        )
        hidden_states = self.add(hidden_states, output, norm)
        if self.cross_attention is not None:
            norm, packed_norm = self.cross_attention_layer_norm, self.packed_layer_norm
            pre_norm = self.pre_norm and packed is not None
            output, packed_output, *_ = self.cross_attention(
                norm(hidden_states) if self.pre_norm else hidden_states,
                packed_norm(packed) if pre_norm else packed,
                context_mask,
                packed_mask,
                output_weights,
                context,
                cross_past,
            )
            hidden_states = self.add(hidden_states, output, norm)
            packed = None if packed_output is None else self.add(packed, packed_output, packed_norm)
        output = self.feed_forward(self.final_layer_norm(hidden_states) if self.pre_norm else hidden_states)
        return (hidden_states + output if self.pre_norm else self.final_layer_norm(hidden_states + output)), packed

    def add(self, residual: torch.Tensor, output: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """Dropout, residual and the norm that follows where norms are not before the attention."""
        residual = residual + self.dropout(output)
        return residual if self.pre_norm else norm(residual)


class LunaDecoder(LunaEncoder):
    """The stack of decoder layers."""

    layer_class = LunaDecoderLayer

    def forward(
        self,
        hidden_states: torch.Tensor,
        packed: list[torch.Tensor | None],
        mask: torch.Tensor | None,
        packed_mask: torch.Tensor | None,
        output_weights: bool,
        context: torch.Tensor | None,
        context_mask: torch.Tensor | None,
        past: LunaCache | LunaSeq2SeqCache | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """As `LunaEncoder.forward`, with the encoder's output `context` `[B, M, d]` and its mask."""
        pasts = cross_pasts = [None] * self.config.num_hidden_layers
        if isinstance(past, LunaSeq2SeqCache):
            pasts, cross_pasts = past.self_attention_cache.layers, past.cross_attention_cache.layers
        elif past is not None:
            pasts = past.layers
        packed_states = [packed[0]]
        for index, layer in self.used_layers():
            rows = packed_states[-1] if self.config.contextual_projection else packed[index]
            hidden_states, rows = layer(
                hidden_states,
                rows,
                mask,
                packed_mask,
                output_weights,
                context,
                context_mask,
                pasts[index],
                cross_pasts[index],
            )
            packed_states.append(rows)
        return self.final_norm(hidden_states, packed_states)


class LunaPreTrainedModel(PreTrainedModel):
    """Base of the Luna models: configuration, initialisation and what transformers asks of a model."""

    config_class = LunaConfig
    config: LunaConfig
    base_model_prefix = "luna"
    cache_class, seq2seq_cache_class = LunaCache, LunaSeq2SeqCache
    supports_gradient_checkpointing = True
    # "eager" computes attention step by step and has weights to return; "sdpa" (default) is `luna_mega.kernels`.
    _supports_sdpa = True
    _no_split_modules = ["LunaLayer", "LunaDecoderLayer", "LunaEmbeddings"]
    _can_record_outputs = {
        "hidden_states": LunaLayer,
        "attentions": [
            OutputRecorder(LunaAttention, index=2, layer_name="attention"),
            OutputRecorder(LunaCausalAttention, index=1),
        ],
        "cross_attentions": OutputRecorder(LunaAttention, index=2, layer_name="cross_attention"),
        "packed_attentions": OutputRecorder(LunaAttention, index=3),
    }

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        if config.input_type == "values":
            self.main_input_name = "input_values"

    @property
    def embedding_range(self) -> float:
        """Standard deviation of initial embeddings: scaled by sqrt(d), they have entries around 1."""
        return self.config.hidden_size**-0.5 if self.config.scale_embedding else self.config.initializer_range

    def require_tokens(self):
        """Refuse a configuration of real values for a class or method that needs tokens."""
        if self.config.input_type != "tokens":
            raise ValueError(f"{type(self).__name__} needs input_type='tokens', got {self.config.input_type!r}")

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        self.require_tokens()
        return super().resize_token_embeddings(*args, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, LunaEmbeddings) and module.has_projection:
            init.normal_(module.packed_embeddings, std=self.embedding_range)
        elif isinstance(module, nn.Embedding) and self.config.scale_embedding:
            init.normal_(module.weight, std=self.embedding_range)
            if module.padding_idx is not None:
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, LunaValueEmbeddings):
            init.normal_(module.weight, std=self.config.initializer_range)
            init.zeros_(module.bias)


_FORWARD_KWARGS = {"num_items_in_batch", "output_hidden_states", "output_attentions", "output_packed_attentions"}
_FORWARD_KWARGS |= PACKED_BATCH


class LunaModel(LunaPreTrainedModel):
    """Luna without a head: the encoder, or with `is_decoder` a decoder."""

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        if config.is_encoder_decoder:
            raise ValueError(
                f"{type(self).__name__} is one side only, and the configuration has is_encoder_decoder=True: use "
                "LunaSeq2SeqModel, LunaForConditionalGeneration or their Auto classes"
            )
        self.embeddings = LunaEmbeddings(config)
        if config.is_decoder:
            self.decoder = LunaDecoder(config)
        else:
            self.encoder = LunaEncoder(config)
        self.post_init()

    @classmethod
    def _for_auto_model(cls, config):
        """The class that `AutoModel`, which knows one for every kind of configuration, means by this one."""
        if cls is LunaModel and isinstance(config, LunaConfig) and config.is_encoder_decoder:
            from luna_mega.modeling_luna.generation_luna import LunaSeq2SeqModel

            return LunaSeq2SeqModel
        return super()

    @classmethod
    def _from_config(cls, config: LunaConfig, **kwargs) -> LunaPreTrainedModel:
        return cls._for_auto_model(config)._from_config(config, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs) -> LunaPreTrainedModel:
        model_class = cls._for_auto_model(config)
        return model_class.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        if self.config.input_type == "values":
            return self.embeddings.value_embeddings
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module):
        self.require_tokens()
        self.embeddings.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        packed_states: torch.FloatTensor | None = None,
        packed_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: LunaCache | LunaSeq2SeqCache | None = None,
        use_cache: bool | None = None,
        # Not by the name of kwargs, for which `generate` would hand the encoder what is the decoder's.
        **options: Unpack[TransformersKwargs],
    ) -> LunaModelOutput:
        """Encode, or decode, a batch of B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens (`input_type="tokens"`).
            attention_mask: `[B, T]`, 1 = keep. None = all positions, with `input_ids` all that are not `pad_token_id`.
            inputs_embeds: `[B, T, d]` embeddings in place of tokens or values.
            input_values: `[B, T]` real numbers (`input_type="values"`).
            position_ids: `[B, T]`, the first token at 0; None = counted from `attention_mask`. Where they do not rise
                within a row, without an `attention_mask`, a new sequence begins: a packed batch, which is S sequences
                end to end, as `DataCollatorWithFlattening` makes it. It has P for each, `[S, L, d]`, and no cache.
            packed_states: `[B, L, d]`, P in place of the learned one: of an encoder the `packed_last_hidden_state` of
                the segment before, so that P is a memory that runs through a document (section 6, future work); of a
                decoder that of an encoder, or of a LunaModel that has read a prefix (section 3.3). A sequence with no
                token at all leaves an encoder's P as it was.
            packed_mask: `[B, L]`, 1 = a row of `packed_states` that is in use; None = all.
            encoder_hidden_states, encoder_attention_mask: `[B, M, d]` and `[B, M]`, `add_cross_attention` only.
            past_key_values: `is_decoder` only: what was returned for the positions before these. It is changed in
                place, and holds what came from the encoder. `attention_mask` is that of the T positions, or of these
                and all before them.
            use_cache: `is_decoder` only: return `past_key_values`. None = `config.use_cache`, but not in training.
            options: `output_hidden_states`, `output_attentions`, `output_packed_attentions`, `return_dict`; of a packed
                batch also `cu_seq_lens_q` `[S + 1]` and `max_length_q`, or `seq_idx` `[B, T]`.

        Returns:
            `LunaModelOutput`.

        Raises:
            ValueError: not exactly one kind of input, an empty batch, a mask of another shape, a sequence longer than
                the learned positions, a cache of another model or batch, an argument that Luna does not have.
        """
        if unknown := options.keys() - _FORWARD_KWARGS:
            raise ValueError(f"Luna models take no {', '.join(sorted(unknown))}; leave the argument out")
        output_weights = self._output_weights(options)
        output_hidden_states = options.get("output_hidden_states", self.config.output_hidden_states)
        past = begin_cache(self, past_key_values, use_cache)
        given = next((x for x in (inputs_embeds, input_ids, input_values) if x is not None), None)
        if past is not None and past.get_seq_length() and attention_mask is not None and given is not None:
            attention_mask = attention_mask[:, -given.shape[1] :]
        inputs_embeds, mask = self._embed(input_ids, attention_mask, inputs_embeds, input_values)
        batch, length = inputs_embeds.shape[:2]
        if past is not None:
            self._check_cache(past, batch)
        may_unpad = self.config.unpad_inputs and past is None and not output_weights and not output_hidden_states
        restarts = position_ids if attention_mask is None else None
        packing = find_packing((batch, length), mask, restarts, options, may_unpad)
        if packing is not None:
            self._check_packed(past_key_values, use_cache, output_weights, output_hidden_states, batch)
            past = None  # what a decoder would have begun by default
            inputs_embeds = packing.pack(inputs_embeds)
        layout = mask if packing is None else packing.sequences
        position_ids = self._position_ids(position_ids, inputs_embeds, mask, packing, past)
        hidden_states = self.embeddings(inputs_embeds, mask if packing is None else None, position_ids)
        packed, packed_mask = self._packed(inputs_embeds, layout, packed_states, packed_mask, past)
        context = (encoder_hidden_states, None if encoder_attention_mask is None else encoder_attention_mask.bool())
        hidden_states, states = self._run_layers(
            hidden_states, packed, layout, packed_mask, output_weights, *context, past
        )
        if packed_states is not None and layout is not None and not self.config.is_decoder:
            read = mask.any(dim=1) if packing is None else layout.cu_seqlens.diff() > 0
            states[-1] = torch.where(read[:, None, None], states[-1], packed_states)
        if packing is not None:
            hidden_states = packing.unpack(hidden_states, batch, length)
        return LunaModelOutput(
            last_hidden_state=hidden_states,
            packed_last_hidden_state=states[-1],
            packed_mask=None if packed_mask is None else packed_mask.long(),
            attention_mask=None if mask is None or self.config.is_decoder else mask.long(),
            past_key_values=past,
            packed_hidden_states=tuple(states) if output_hidden_states and states[-1] is not None else None,
        )

    def _run_layers(self, hidden_states, packed, layout, packed_mask, output_weights, context, context_mask, past):
        inputs = (hidden_states, packed, layout, packed_mask, output_weights)
        if self.config.is_decoder:
            self._check_context(context, context_mask, past)
            return self.decoder(*inputs, context, context_mask, past)
        if context is not None or context_mask is not None:
            raise ValueError("encoder_hidden_states needs a decoder with add_cross_attention=True")
        return self.encoder(*inputs)

    def _check_cache(self, past, batch):
        config = self.config
        layers = past.self_attention_cache.layers if config.add_cross_attention else past.layers
        if not layers[0].is_initialized:
            return
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        given = tuple(layers[0].tensors["key_mean"].shape[:3])
        if given != (batch, heads, width) or len(layers) != config.num_hidden_layers:
            raise ValueError(
                f"past_key_values does not fit this model and batch: {len(layers)} layers with states of (batch, "
                f"heads, head size) {given}, needed are {config.num_hidden_layers} with {(batch, heads, width)}"
            )

    def _check_packed(self, past, use_cache, output_weights, output_hidden_states, batch):
        """Refuse what sequences laid end to end do not have."""
        if past is not None or use_cache:
            raise ValueError("a packed batch has no cache: leave past_key_values out and pass use_cache=False")
        if self.config.add_cross_attention:
            raise ValueError("a decoder with add_cross_attention=True takes no packed batch: pad it")
        if output_weights:
            raise ValueError(
                "a packed batch has no attention weights to return: pass output_attentions=False and load the model "
                "with attn_implementation='sdpa'"
            )
        if output_hidden_states and batch > 1:
            raise ValueError(f"output_hidden_states=True takes a packed batch of one row, not one of {batch}")

    def _position_ids(self, position_ids, inputs_embeds, mask, packing, past):
        """A token's position counts the tokens before it that the mask keeps, so that neither side nor amount of
        padding matters. `[B or 1, T]`."""
        length = inputs_embeds.shape[1]
        if packing is not None:
            length = packing.sequences.max_seqlen
            if position_ids is None:
                position_ids = locate(packing.sequences.cu_seqlens, inputs_embeds.shape[1])[1][None]
            else:
                position_ids = packing.pack(position_ids)
        elif position_ids is None:
            if mask is None:
                position_ids = torch.arange(length, device=inputs_embeds.device)[None]
            else:
                position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
            if past is not None and past.get_seq_length():
                cache = past.self_attention_cache if self.config.add_cross_attention else past
                position_ids = position_ids + cache.layers[0].tensors["count"][:, None]
        self._check_positions(length, position_ids, past)
        return position_ids

    def _check_positions(self, length, position_ids, past):
        """Refuse positions that are not in the table of learned ones."""
        table = self.config.max_position_embeddings
        length += 0 if past is None else past.get_seq_length()
        if self.config.position_embedding_type == "learned" and length > table:
            # With a cache the length counts padding, which has no positions.
            if past is None or (length := int(position_ids.max()) + 1) > table:
                raise ValueError(
                    f"sequences of length {length} exceed the {table} learned positions of the model; truncate the "
                    "input or train with a larger max_position_embeddings (max_target_positions of a decoder)"
                )

    def _packed(self, inputs_embeds, mask, packed_states, packed_mask, past):
        """P for every layer and the bool mask of its rows."""
        layers = self.config.num_hidden_layers
        if past is not None and past.get_seq_length():
            cache = past.self_attention_cache if self.config.add_cross_attention else past
            return [None] * layers, cache.layers[0].tensors.get("pack_mask")
        if packed_states is not None:
            batch, _, width = inputs_embeds.shape
            if isinstance(mask, Sequences):
                batch = len(mask.cu_seqlens) - 1
            if packed_states.dim() != 3 or packed_states.shape[::2] != (batch, width):
                raise ValueError(
                    f"packed_states must have the shape [{batch}, rows, {width}], got {list(packed_states.shape)}"
                )
            if packed_mask is not None and packed_mask.shape != packed_states.shape[:2]:
                raise ValueError(
                    f"packed_mask must have the shape {list(packed_states.shape[:2])} of packed_states, got "
                    f"{list(packed_mask.shape)}"
                )
            return [packed_states] * layers, drop_if_full(None if packed_mask is None else packed_mask.bool())
        if packed_mask is not None:
            raise ValueError("packed_mask is the mask of packed_states: give both, or neither")
        if not self.embeddings.has_projection:
            raise ValueError("a decoder with add_cross_attention=True needs packed_states, the P of its encoder")
        return self.embeddings.packed(inputs_embeds, mask)

    def _check_context(self, context, context_mask, past):
        if not self.config.add_cross_attention:
            if context is not None or context_mask is not None:
                raise ValueError("encoder_hidden_states needs a decoder with add_cross_attention=True")
        elif context is None and (past is None or not past.get_seq_length()):
            raise ValueError("a decoder with add_cross_attention=True needs encoder_hidden_states")
        elif context is not None and context_mask is not None and context_mask.shape != context.shape[:2]:
            raise ValueError(
                f"encoder_attention_mask must have the shape {list(context.shape[:2])} of encoder_hidden_states, got "
                f"{list(context_mask.shape)}"
            )

    def _output_weights(self, options):
        """Whether attention runs step by step, which has weights to return."""
        return self.config._attn_implementation == "eager" or any(
            options.get(name, getattr(self.config, name, False))
            for name in ("output_attentions", "output_packed_attentions")
        )

    def _embed(self, input_ids, attention_mask, inputs_embeds, input_values):
        """Check the inputs; return embeddings without positions `[B, T, d]` and bool mask `[B, T]` (None = all)."""
        name = "input_ids" if self.config.input_type == "tokens" else "input_values"
        inputs = input_ids if name == "input_ids" else input_values
        other = input_values if name == "input_ids" else input_ids
        if other is not None or (inputs is None) == (inputs_embeds is None):
            raise ValueError(
                f"this model has input_type={self.config.input_type!r}: give exactly one of {name} and inputs_embeds"
            )
        batch, length = (inputs if inputs_embeds is None else inputs_embeds).shape[:2]
        if batch == 0 or length == 0:
            raise ValueError(f"the batch is empty: {batch} sequences of length {length}")
        if attention_mask is not None and attention_mask.shape != (batch, length):
            raise ValueError(
                f"attention_mask must have the shape [{batch}, {length}] of the input, got {list(attention_mask.shape)}"
            )
        mask = None if attention_mask is None else attention_mask.bool()
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(inputs)
            if mask is None and name == "input_ids":
                mask = input_ids != self.config.pad_token_id
        return inputs_embeds, drop_if_full(mask)


__all__ = ["LunaModel", "LunaPreTrainedModel"]
