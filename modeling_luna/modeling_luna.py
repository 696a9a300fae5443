"""Luna: Linear Unified Nested Attention (Ma et al. 2021, arXiv 2106.01540).

Attention to a context of length n is split in two: a short *packed* sequence P of l rows attends to the context (pack),
and every token attends to the l rows that came out (unpack). Time and memory are linear in n. P is carried from layer
to layer beside the tokens. From top to bottom: outputs, embeddings, attention, layer, encoder, model, masked-LM head.
The other heads are in `heads_luna.py`.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MaskedLMOutput, ModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.pytorch_utils import apply_chunking_to_forward
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import luna_attention
from luna_mega.kernels.luna_attention.reference import attend as attend_with_weights
from luna_mega.kernels.masks import drop_if_full
from luna_mega.modeling_luna.configuration_luna import LunaConfig


@dataclass
class LunaModelOutput(ModelOutput):
    """Output of `LunaModel`. B sequences of T positions, L = min(l, T) rows of P, width d, N layers.

    Args:
        last_hidden_state: `[B, T, d]`.
        packed_last_hidden_state: `[B, L, d]`; rows that `packed_mask` excludes are meaningless.
        packed_mask: `[B, L]`, 1 = a row of P that is in use; None = all are.
        hidden_states, packed_hidden_states: with `output_hidden_states=True`, N + 1 tensors each, the embeddings first.
        attentions: with `output_attentions=True`, the unpack weights of every layer, `[B, heads, T, L]`.
        packed_attentions: with `output_packed_attentions=True`, the pack weights, `[B, pack heads, L, T]`.
    """

    last_hidden_state: torch.FloatTensor | None = None
    packed_last_hidden_state: torch.FloatTensor | None = None
    packed_mask: torch.LongTensor | None = None
    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    packed_attentions: tuple[torch.FloatTensor, ...] | None = None

    def recorded(self) -> dict[str, tuple[torch.FloatTensor, ...] | None]:
        """What was recorded on request, for the output of a head."""
        names = ("hidden_states", "attentions", "packed_hidden_states", "packed_attentions")
        return {name: getattr(self, name) for name in names}


@dataclass
class LunaMaskedLMOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the packed sequence and attention of each layer, see `LunaModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed_attentions: tuple[torch.FloatTensor, ...] | None = None


def sinusoids(length: int, width: int, device: torch.device) -> torch.Tensor:
    """Sinusoidal positions 0 to length - 1, `[length, width]` in float32: sines, then cosines, as in fairseq."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, device=device, dtype=torch.float32) * (-math.log(10000.0) / (half - 1)))
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    return nn.functional.pad(torch.cat([angle.sin(), angle.cos()], dim=1), (0, width % 2))


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
        layers = () if config.contextual_projection else (config.num_hidden_layers,)
        self.packed_embeddings = nn.Parameter(torch.empty(*layers, config.projection_length, width))
        if config.embedding_norm:
            self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
            self.packed_layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.scale = math.sqrt(width) if config.scale_embedding else 1.0

    def forward(
        self, inputs_embeds: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        """`[B, T, d]` embeddings without positions -> tokens `[B, T, d]`, P `[B, L, d]` (one tensor, or one a layer
        where P is not contextual), and the mask of P `[B, L]`. `mask` is `[B, T]` bool, True = keep."""
        hidden_states = inputs_embeds * self.scale
        positions = self.positions(inputs_embeds, mask, position_ids)
        if positions is not None:
            hidden_states = hidden_states + positions
        if self.config.embedding_norm:
            hidden_states = self.layer_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)
        packed, packed_mask = self.packed(inputs_embeds, mask)
        if mask is not None:
            hidden_states = hidden_states.masked_fill(~mask[..., None], 0.0)
        if packed_mask is not None:
            packed = [rows.masked_fill(~packed_mask[..., None], 0.0) for rows in packed]
        return hidden_states, packed, packed_mask

    def positions(self, inputs_embeds, mask, position_ids):
        """Position embeddings, `[B or 1, T, d]`. A token's position counts the tokens before it that the mask keeps, so
        that neither side nor amount of padding matters."""
        if self.config.position_embedding_type == "none":
            return None
        length, offset = inputs_embeds.shape[1], self.config.position_offset
        if position_ids is None and mask is None:
            position_ids = torch.arange(length, device=inputs_embeds.device)[None]
        elif position_ids is None:
            position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
        if self.config.position_embedding_type == "learned":
            return self.position_embeddings(position_ids + offset)
        table = sinusoids(length + offset, inputs_embeds.shape[2], inputs_embeds.device).to(inputs_embeds.dtype)
        return nn.functional.embedding(position_ids + offset, table)

    def packed(self, inputs_embeds, mask):
        """P cut to min(l, T) rows, and of those each sequence uses as many as it has tokens. T is known to the host, so
        the cut costs no synchronisation; the mask does the rest. An exported program serves every T: no cut."""
        batch, length, width = inputs_embeds.shape
        packed = self.packed_embeddings
        packed_mask = None
        if self.config.dynamic_projection_length:
            if torch.compiler.is_exporting():
                mask = inputs_embeds.new_ones((batch, length), dtype=torch.bool) if mask is None else mask
            else:
                packed = packed[..., :length, :]
            if mask is not None:
                rows = torch.arange(packed.shape[-2], device=mask.device)
                packed_mask = rows < mask.sum(dim=1, keepdim=True)
        packed = packed * self.scale
        if self.config.position_embedding_type == "sinusoidal":
            packed = packed + sinusoids(packed.shape[-2], width, packed.device).to(packed.dtype)
        if self.config.embedding_norm:
            packed = self.packed_layer_norm(packed)
        layers = [packed] if self.config.contextual_projection else packed.unbind()
        # Expanded before dropout: every sequence draws a mask of its own.
        return [self.dropout(rows.expand(batch, -1, -1)) for rows in layers], packed_mask


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
        packed: torch.Tensor,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        output_weights: bool = False,
        context: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Queries `[B, T, d]` attend through P `[B, L, d]` to the context `[B, M, d]` (None = the queries themselves).

        Returns the output `[B, T, d]`, the packed context `[B, L, d]`, and with `output_weights` the unpack weights
        `[B, heads, T, L]` and pack weights `[B, pack heads, L, M]` (else None). `mask` `[B, M]` and `packed_mask` `[B,
        L]` are bool, True = keep.
        """
        context = hidden_states if context is None else context
        query = _split(self.query(hidden_states), self.num_heads)
        pack_query = _split(self.pack_query(packed), self.num_pack_heads)
        dropout = self.dropout if self.training else 0.0
        weights = pack_weights = None
        if output_weights:
            pack_scale, scale = pack_query.shape[-1] ** -0.5, query.shape[-1] ** -0.5
            packed, pack_weights = attend_with_weights(
                pack_query, *self.context_key_value(context), mask, pack_scale, dropout
            )
            output, weights = attend_with_weights(query, *self.packed_key_value(packed), packed_mask, scale, dropout)
        else:
            output, packed = luna_attention(
                query,
                pack_query,
                *self.context_key_value(context),
                self.packed_key_value,
                context_mask=mask,
                pack_mask=packed_mask,
                dropout=dropout,
            )
        return self.output(output.flatten(2)), packed.flatten(2), weights, pack_weights


def _split(projected: torch.Tensor, heads: int) -> torch.Tensor:
    return projected.unflatten(-1, (heads, -1))


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

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.config = config
        layers = 1 if config.share_layers else config.num_hidden_layers
        self.layers = nn.ModuleList(LunaLayer(config) for _ in range(layers))
        if config.pre_norm:
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
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
        for index in range(self.config.num_hidden_layers):
            layer = self.layers[0 if self.config.share_layers else index]
            if self.training and self.config.layerdrop and torch.rand(()) < self.config.layerdrop:
                continue
            rows = packed_states[-1] if self.config.contextual_projection else packed[index]
            hidden_states, rows = layer(hidden_states, rows, mask, packed_mask, output_weights)
            packed_states.append(rows)
        if self.config.pre_norm:
            hidden_states = self.layer_norm(hidden_states)
            packed_states[-1] = self.packed_layer_norm(packed_states[-1])
        return hidden_states, packed_states


class LunaPreTrainedModel(PreTrainedModel):
    """Base of the Luna models: configuration, initialisation and what transformers asks of a model."""

    config_class = LunaConfig
    config: LunaConfig
    base_model_prefix = "luna"
    supports_gradient_checkpointing = True
    # "eager" computes attention step by step and has weights to return; "sdpa" (default) is `luna_mega.kernels`.
    _supports_sdpa = True
    _no_split_modules = ["LunaLayer", "LunaEmbeddings"]
    _can_record_outputs = {
        "hidden_states": LunaLayer,
        "attentions": OutputRecorder(LunaAttention, index=2),
        "packed_attentions": OutputRecorder(LunaAttention, index=3),
    }

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        if config.input_type == "values":
            self.main_input_name = "input_values"

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
        if isinstance(module, LunaEmbeddings):
            init.normal_(module.packed_embeddings, std=self.config.initializer_range)
        elif isinstance(module, LunaValueEmbeddings):
            init.normal_(module.weight, std=self.config.initializer_range)
            init.zeros_(module.bias)


_FORWARD_KWARGS = {"num_items_in_batch", "output_hidden_states", "output_attentions", "output_packed_attentions"}


class LunaModel(LunaPreTrainedModel):
    """The Luna encoder without a head."""

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.embeddings = LunaEmbeddings(config)
        self.encoder = LunaEncoder(config)
        self.post_init()

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaModelOutput:
        """Encode a batch of B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens (`input_type="tokens"`).
            attention_mask: `[B, T]`, 1 = keep. None = all positions, with `input_ids` all that are not `pad_token_id`.
            inputs_embeds: `[B, T, d]` embeddings in place of tokens or values.
            input_values: `[B, T]` real numbers (`input_type="values"`).
            position_ids: `[B, T]`, the first token at 0; None = counted from `attention_mask`.
            kwargs: `output_hidden_states`, `output_attentions`, `output_packed_attentions`, `return_dict`.

        Returns:
            `LunaModelOutput`.

        Raises:
            ValueError: not exactly one kind of input, an empty batch, a mask of another shape, a sequence longer than
                the learned positions, an argument that Luna does not have.
        """
        if unknown := kwargs.keys() - _FORWARD_KWARGS:
            raise ValueError(f"Luna models take no {', '.join(sorted(unknown))}; leave the argument out")
        inputs_embeds, mask = self._embed(input_ids, attention_mask, inputs_embeds, input_values)
        hidden_states, packed, packed_mask = self.embeddings(inputs_embeds, mask, position_ids)
        output_weights = self.config._attn_implementation == "eager" or any(
            kwargs.get(name, getattr(self.config, name, False))
            for name in ("output_attentions", "output_packed_attentions")
        )
        hidden_states, packed_states = self.encoder(hidden_states, packed, mask, packed_mask, output_weights)
        output_hidden_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        return LunaModelOutput(
            last_hidden_state=hidden_states,
            packed_last_hidden_state=packed_states[-1],
            packed_mask=None if packed_mask is None else packed_mask.long(),
            packed_hidden_states=tuple(packed_states) if output_hidden_states else None,
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
        if self.config.position_embedding_type == "learned" and length > self.config.max_position_embeddings:
            raise ValueError(
                f"sequences of length {length} exceed the {self.config.max_position_embeddings} learned positions of "
                "the model; truncate the input or train with a larger max_position_embeddings"
            )
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


class LunaLMHead(nn.Module):
    """Masked-LM head: dense, activation, LayerNorm, decoder."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.layer_norm(self.activation(self.dense(hidden_states))))


class LunaForMaskedLM(LunaPreTrainedModel):
    """Luna with a masked-language-modelling head (`luna_bert` of the original code)."""

    _tied_weights_keys = {"lm_head.decoder.weight": "luna.embeddings.word_embeddings.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^pooler\.", r"^classifier\."]

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.require_tokens()
        self.luna = LunaModel(config)
        self.lm_head = LunaLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module):
        self.lm_head.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaMaskedLMOutput:
        """As `LunaModel.forward`; `labels` `[B, T]`: tokens, -100 = not predicted.

        `logits`: `[B, T, vocab_size]`, with `sparse_prediction` and labels only those of the M predicted positions,
        `[M, vocab_size]`.
        """
        outputs = self.luna(input_ids, attention_mask, inputs_embeds=inputs_embeds, position_ids=position_ids, **kwargs)
        hidden_states = outputs.last_hidden_state
        if labels is not None and self.config.sparse_prediction:
            predicted = labels != -100
            hidden_states, labels = hidden_states[predicted], labels[predicted]
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return LunaMaskedLMOutput(loss=loss, logits=logits, **outputs.recorded())


__all__ = ["LunaForMaskedLM", "LunaModel", "LunaPreTrainedModel"]
