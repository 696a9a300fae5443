"""Mega: Moving Average Equipped Gated Attention (Ma et al. 2022, arXiv 2209.10655).

A block smooths its input with a multi-dimensional damped moving average, lets a single attention head look at the
smoothed sequence, and gates the result into the residual; attention may be confined to chunks, across which the
moving average still carries information. From top to bottom: embeddings, moving average, gated attention, feed-forward
layer, block, model, masked-LM head. The other heads are in `heads_mega.py`.

Names of modules and parameters are those of the Mega of transformers v4, so that its checkpoints load as they are.
There `damping_factor` holds the logits of the paper's alpha (weight of the input), `decay_factor` those of its delta.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedLMOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import damped_ema, gated_attention
from luna_mega.kernels.gated_attention.reference import attention_weights, into_chunks
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.norms import MegaScaleNorm, build_norm
from luna_mega.modeling_mega.position import MegaRotaryRelativeBias, MegaSimpleRelativeBias


class MegaValueEmbeddings(nn.Module):
    """A real number x becomes x * weight + bias, `[B, T]` to `[B, T, d]` (pixels, audio samples)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, values[..., None].to(self.weight.dtype), self.weight)


class MegaEmbeddings(nn.Module):
    """Tokens or real values; a Mega model has no position embeddings."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        if config.input_type == "tokens":
            self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        else:
            self.value_embeddings = MegaValueEmbeddings(config.hidden_size)
        if config.add_token_type_embeddings:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0

    def forward(self, inputs_embeds: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        hidden_states = inputs_embeds * self.scale
        if not hasattr(self, "token_type_embeddings"):
            return hidden_states
        if token_type_ids is None:
            token_type_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        return hidden_states + self.token_type_embeddings(token_type_ids)


class MegaSequenceNorm(nn.Module):
    """The norm that `config.normalization_type` names, for `[B, T, d]`; `mask` keeps padding out of its statistics."""

    def __init__(self, config: MegaConfig, affine: bool):
        super().__init__()
        self.norm = build_norm(
            config.normalization_type,
            config.hidden_size,
            affine=affine,
            padded_statistics=config.padded_batch_statistics,
            legacy_rms_norm=config.legacy_rms_norm,
        )

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.norm(hidden_states, mask)


class MegaDropout(nn.Module):
    """Dropout of `[B, T, d]`, of single entries or (feature dropout) of a channel at all positions of a sequence."""

    def __init__(self, probability: float, features: bool):
        super().__init__()
        self.probability, self.features = probability, features

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.features:
            return nn.functional.dropout1d(states.transpose(1, 2), self.probability, self.training).transpose(1, 2)
        return nn.functional.dropout(states, self.probability, self.training)


class MegaMovingAverage(nn.Module):
    """Multi-dimensional damped EMA with its skip connection (section 3.1; equations 1 and 2)."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        rows = config.hidden_size * (2 if config.bidirectional else 1)
        self.damping_factor = nn.Parameter(torch.empty(rows, config.ema_projection_size, 1))
        self.decay_factor = nn.Parameter(torch.empty(rows, config.ema_projection_size, 1))
        self.ema_expansion_matrix = nn.Parameter(torch.empty(rows, config.ema_projection_size, 1))
        self.kernel_projection_matrix = nn.Parameter(torch.empty(rows, config.ema_projection_size))
        self.residual_weight = nn.Parameter(torch.empty(config.hidden_size))
        self.shift, self.truncation = config.ema_shift, config.truncation

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return damped_ema(
            hidden_states,
            self.damping_factor.squeeze(-1),
            self.decay_factor.squeeze(-1),
            self.ema_expansion_matrix.squeeze(-1),
            self.kernel_projection_matrix,
            self.residual_weight,
            mask=mask,
            shift=self.shift,
            truncation=self.truncation,
        )


def _to_front(states: torch.Tensor, mask: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Move each sequence of `[B, T, ...]` so that its first token is at position 0 (`back`: to where it was)."""
    length = mask.shape[1]
    first = mask.int().argmax(dim=1, keepdim=True)
    index = (torch.arange(length, device=mask.device) + (-first if back else first)) % length
    return states.gather(1, index if states.dim() == 2 else index[..., None].expand(-1, -1, states.shape[2]))


class MegaGatedAttention(nn.Module):
    """Moving average equipped gated attention (section 3.2; equations 6 to 13)."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.config = config
        width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
        self.sizes = (width, shared, values, width)
        self.norm = MegaSequenceNorm(config, config.norm_affine)
        self.ema_gate = MegaMovingAverage(config)
        self.v_proj = nn.Linear(width, values)
        self.mx_proj = nn.Linear(width, sum(self.sizes))
        self.h_proj = nn.Linear(values, width)
        self.qk_weight = nn.Parameter(torch.empty(2, shared))
        self.qk_bias = nn.Parameter(torch.empty(2, shared))
        if config.relative_positional_bias == "simple":
            self.rel_pos_bias = MegaSimpleRelativeBias(config.bias_positions)
        else:
            self.rel_pos_bias = MegaRotaryRelativeBias(shared)
        self.activation = ACT2FN[config.activation]
        self.dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.hidden_dropout = MegaDropout(config.hidden_dropout_prob, config.use_feature_dropout)

    def forward(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None, output_weights: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[B, T, d]` -> the same, and with `output_weights` the attention weights `[B, chunks, C, C]`."""
        residual = hidden_states
        if self.config.normalize_before_mega:
            hidden_states = self.norm(hidden_states, mask)
        value = self.hidden_dropout(self.activation(self.v_proj(hidden_states)))
        smoothed = self.dropout(self.ema_gate(hidden_states, mask))
        update, shared, reset, candidate = self.mx_proj(smoothed).split(self.sizes, dim=-1)
        shared, reset = nn.functional.silu(shared), nn.functional.silu(reset)
        attended, weights = self.attend(shared, value, mask, output_weights)
        attended = self.dropout(self.activation(candidate + self.h_proj(attended * reset)))
        # Under autocast the residual is wider than the other two, and lerp wants one dtype.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.config.normalize_before_mega:
            output = self.norm(output, mask)
        return output, weights

    def attend(self, shared, value, mask, output_weights):
        """Attention in chunks that begin with the sequence's first token, wherever padding has put that."""
        chunk = self.config.attention_chunk
        # Only chunks care for absolute positions.
        move = chunk is not None and mask is not None
        if move:
            shared, value, mask_in_place = _to_front(shared, mask), _to_front(value, mask), mask
            mask = _to_front(mask, mask)
        query, key = (shared * self.qk_weight[row] + self.qk_bias[row] for row in (0, 1))
        options = {
            "bias": self.relative_bias(shared.shape[1]),
            "function": self.config.attention_activation,
            "causal": self.config.is_decoder,
            "chunk_size": chunk,
            "mask": mask,
        }
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        if output_weights:
            # Step by step, so that the output depends on the weights that are handed out.
            with torch.autocast(shared.device.type, enabled=False):
                weights = attention_weights(query, key, **options)
                dropped = torch.dropout(weights.to(value.dtype), dropout, train=True)
                attended = (dropped @ into_chunks(value, chunk)).flatten(1, 2)[:, : value.shape[1]]
        else:
            attended, weights = gated_attention(query, key, value, dropout=dropout, **options), None
        return (_to_front(attended, mask_in_place, back=True) if move else attended), weights

    def relative_bias(self, length: int) -> torch.Tensor:
        """The bias of the positions of a chunk, or of all, a vector over their differences."""
        positions = self.config.attention_chunk or length
        if self.config.relative_positional_bias == "simple" and self.config.legacy_bias_table:
            return self.rel_pos_bias(positions, centre=self.config.chunk_size - 1)
        return self.rel_pos_bias(positions)


class MegaNormalizedFeedForwardNetwork(nn.Module):
    """Feed-forward layer with its norm and residual."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.pre_norm = config.normalize_before_ffn
        self.norm = MegaSequenceNorm(config, config.norm_affine)
        self.fc1 = nn.Linear(config.hidden_size, config.nffn_hidden_size)
        self.fc2 = nn.Linear(config.nffn_hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.activation]
        self.dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.hidden_dropout = MegaDropout(config.nffn_activation_dropout_prob, config.use_feature_dropout)

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        residual = hidden_states
        if self.pre_norm:
            hidden_states = self.norm(hidden_states, mask)
        hidden_states = residual + self.dropout(self.fc2(self.hidden_dropout(self.activation(self.fc1(hidden_states)))))
        return hidden_states if self.pre_norm else self.norm(hidden_states, mask)


class MegaBlock(GradientCheckpointingLayer):
    """One Mega block (Figure 2): gated attention, then the feed-forward layer."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.mega_layer = MegaGatedAttention(config)
        self.nffn = MegaNormalizedFeedForwardNetwork(config) if config.use_normalized_ffn else None

    def forward(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None, output_weights: bool = False
    ) -> torch.Tensor:
        hidden_states, _ = self.mega_layer(hidden_states, mask, output_weights)
        return hidden_states if self.nffn is None else self.nffn(hidden_states, mask)


class MegaPooler(nn.Module):
    """The first token through a dense layer with tanh."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(first))


class MegaPreTrainedModel(PreTrainedModel):
    """Base of the Mega models: configuration, initialisation and what transformers asks of a model."""

    config_class = MegaConfig
    config: MegaConfig
    base_model_prefix = "mega"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MegaBlock"]
    # The decay is a sigmoid of logits that half precision would blur (1 - q down to 1e-5).
    _keep_in_fp32_modules_strict = ["ema_gate"]
    # Placeholder buffers of the original code, with arbitrary content.
    _keys_to_ignore_on_load_unexpected = [r"rel_pos_bias\._float_tensor$"]
    _can_record_outputs = {"hidden_states": MegaBlock, "attentions": OutputRecorder(MegaGatedAttention, index=1)}

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        if config.input_type == "values":
            self.main_input_name = "input_values"
        if config.normalization_type.endswith("batchnorm"):
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, "running_mean", "running_var"]

    def require_tokens(self):
        """Refuse a configuration of real values for a class or method that needs tokens."""
        if self.config.input_type != "tokens":
            raise ValueError(f"{type(self).__name__} needs input_type='tokens', got {self.config.input_type!r}")

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        self.require_tokens()
        return super().resize_token_embeddings(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
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
        elif isinstance(module, MegaGatedAttention):
            init.normal_(module.qk_weight, std=std)
            init.zeros_(module.qk_bias)
        elif isinstance(module, MegaScaleNorm) and module.scalar is not None:
            init.ones_(module.scalar)
        elif isinstance(module, MegaSimpleRelativeBias):
            init.normal_(module.rel_pos_bias, std=std)
        elif isinstance(module, MegaRotaryRelativeBias):
            init.normal_(module.alpha, std=std)
            init.normal_(module.b_param, std=std)
        elif isinstance(module, MegaValueEmbeddings):
            init.normal_(module.weight)
            init.normal_(module.bias, std=0.1)


_FORWARD_KWARGS = {"num_items_in_batch", "output_hidden_states", "output_attentions"}


class MegaModel(MegaPreTrainedModel):
    """The Mega encoder without a head."""

    def __init__(self, config: MegaConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        if config.is_decoder:
            raise ValueError(
                "is_decoder=True: this version has the Mega encoder only; a decoder's folder loads in a version with "
                "MegaForCausalLM"
            )
        self.embedding_layer = MegaEmbeddings(config)
        self.embedding_norm = MegaSequenceNorm(config, config.norm_affine) if config.embedding_norm else None
        self.embedding_dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.layers = nn.ModuleList(MegaBlock(config) for _ in range(config.num_hidden_layers))
        self.final_norm = MegaSequenceNorm(config, config.final_norm_affine) if config.final_norm else None
        self.pooler = MegaPooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        if self.config.input_type == "values":
            return self.embedding_layer.value_embeddings
        return self.embedding_layer.word_embeddings

    def set_input_embeddings(self, value: nn.Module):
        self.require_tokens()
        self.embedding_layer.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode a batch of B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens (`input_type="tokens"`).
            attention_mask: `[B, T]`, 1 = keep. None = all positions, with `input_ids` all that are not `pad_token_id`.
            inputs_embeds: `[B, T, d]` embeddings in place of tokens or values.
            input_values: `[B, T]` real numbers (`input_type="values"`).
            token_type_ids: `[B, T]`, with `add_token_type_embeddings`; None = all 0.
            kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `last_hidden_state` `[B, T, d]` (rows at padding are meaningless), `pooler_output` `[B, d]` or None,
            `hidden_states` N + 1 of `[B, T, d]`, `attentions` N of `[B, chunks, C, C]`.

        Raises:
            ValueError: not exactly one kind of input, an empty batch, a mask of another shape, a sequence longer than
                the bias table, an argument that Mega does not have.
        """
        if unknown := kwargs.keys() - _FORWARD_KWARGS:
            raise ValueError(f"Mega models take no {', '.join(sorted(unknown))}; leave the argument out")
        if token_type_ids is not None and not self.config.add_token_type_embeddings:
            raise ValueError("this model has add_token_type_embeddings=False: leave token_type_ids out")
        inputs_embeds, mask = self._embed(input_ids, attention_mask, inputs_embeds, input_values)
        hidden_states = self.embedding_layer(inputs_embeds, token_type_ids)
        if self.embedding_norm is not None:
            hidden_states = self.embedding_norm(hidden_states, mask)
        hidden_states = self.embedding_dropout(hidden_states)
        if self.config.padded_batch_statistics and mask is not None:
            # What the original's batch norm counts at padding.
            hidden_states = hidden_states.masked_fill(~mask[..., None], 0.0)
        output_weights = kwargs.get("output_attentions", self.config.output_attentions)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, output_weights)
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states, mask)
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden_states,
            pooler_output=None if self.pooler is None else self.pooler(first_token(hidden_states, mask)),
        )

    def _embed(self, input_ids, attention_mask, inputs_embeds, input_values):
        """Check the inputs; return embeddings `[B, T, d]` and bool mask `[B, T]` (None = all)."""
        name = "input_ids" if self.config.input_type == "tokens" else "input_values"
        inputs = input_ids if name == "input_ids" else input_values
        other = input_values if name == "input_ids" else input_ids
        if other is not None or (inputs is None) == (inputs_embeds is None):
            raise ValueError(
                f"this model has input_type={self.config.input_type!r}: give exactly one of {name} and inputs_embeds"
            )
        given, width = (inputs, []) if inputs_embeds is None else (inputs_embeds, [self.config.hidden_size])
        if given.dim() < 2 or list(given.shape[2:]) != width:
            raise ValueError(
                f"this model takes {name} [B, T] or inputs_embeds [B, T, {self.config.hidden_size}], got the shape "
                f"{list(given.shape)}"
            )
        batch, length = given.shape[:2]
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
        return inputs_embeds, mask


def first_token(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The first position of `[B, T, d]` that the mask keeps, `[B, d]`: with padding on the left it is not 0."""
    if mask is None:
        return states[:, 0]
    index = mask.int().argmax(dim=1)[:, None, None].expand(-1, 1, states.shape[2])
    return states.gather(1, index)[:, 0]


class MegaForMaskedLM(MegaPreTrainedModel):
    """Mega with a masked-language-modelling head."""

    _tied_weights_keys = {"mlm_head.weight": "mega.embedding_layer.word_embeddings.weight"}

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        self.require_tokens()
        self.mega = MegaModel(config, add_pooling_layer=False)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.add_lm_hidden_dense_layer else None
        self.dropout = nn.Dropout(config.dropout_prob)
        self.mlm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.mlm_head

    def set_output_embeddings(self, new_embeddings: nn.Module):
        self.mlm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """As `MegaModel.forward`; `labels` `[B, T]`: tokens, -100 = not predicted.

        `logits`: `[B, T, vocab_size]`, with `sparse_prediction` and labels only those of the M predicted positions,
        `[M, vocab_size]`.
        """
        outputs = self.mega(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        hidden_states = outputs.last_hidden_state
        if labels is not None and self.config.sparse_prediction:
            predicted = labels != -100
            hidden_states, labels = hidden_states[predicted], labels[predicted]
        if self.dense is not None:
            hidden_states = torch.tanh(self.dense(hidden_states))
        logits = self.mlm_head(self.dropout(hidden_states))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = ["MegaForMaskedLM", "MegaModel", "MegaPreTrainedModel"]
