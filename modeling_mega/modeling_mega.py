"""Mega: Moving Average Equipped Gated Attention (Ma et al. 2022, arXiv 2209.10655).

A block smooths its input with a multi-dimensional damped moving average, lets a single attention head look at the
smoothed sequence, and gates the result into the residual; attention may be confined to chunks, across which the
moving average still carries information. From top to bottom: embeddings, moving average, gated attention, feed-forward
layer, block, model, masked-LM head. The other heads are in `heads_mega.py`, language models and translation in
`generation_mega.py`.

Names of modules and parameters are those of the Mega of transformers v4, so that its checkpoints load as they are.
There `damping_factor` holds the logits of the paper's alpha (weight of the input), `decay_factor` those of its delta.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, MaskedLMOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import damped_ema, damped_ema_step, gated_attention
from luna_mega.kernels.damped_ema.reference import log_decay
from luna_mega.kernels.gated_attention.reference import attention_weights, into_chunks
from luna_mega.kernels.masks import drop_if_full
from luna_mega.kernels.varlen import PACKED_BATCH, Sequences, as_options, find_packing
from luna_mega.modeling_common.cache import begin_cache
from luna_mega.modeling_mega.adaptive import MegaAdaptiveEmbedding
from luna_mega.modeling_mega.cache_mega import MegaCache, MegaCacheLayer, MegaCrossCacheLayer, MegaSeq2SeqCache
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.cross_attention import MegaGatedCrossAttention
from luna_mega.modeling_mega.norms import MegaScaleNorm
from luna_mega.modeling_mega.parts import MegaDropout, MegaSequenceNorm, build_relative_bias, relative_bias, to_front
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
        if config.input_type == "values":
            self.value_embeddings = MegaValueEmbeddings(config.hidden_size)
        elif config.adaptive_input_cutoffs is not None:
            self.word_embeddings = MegaAdaptiveEmbedding(config)
        else:
            size = config.embedding_size
            self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
            if size != config.hidden_size:
                self.projection = nn.Linear(size, config.hidden_size, bias=False)
        if config.add_token_type_embeddings:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0

    def forward(self, inputs_embeds: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        hidden_states = inputs_embeds * self.scale
        if hasattr(self, "projection"):
            hidden_states = self.projection(hidden_states)
        if not hasattr(self, "token_type_embeddings"):
            return hidden_states
        if token_type_ids is None:
            token_type_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        return hidden_states + self.token_type_embeddings(token_type_ids)


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

    def forward(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None, past: MegaCacheLayer | None = None
    ) -> torch.Tensor:
        parameters = (
            self.damping_factor.squeeze(-1),
            self.decay_factor.squeeze(-1),
            self.ema_expansion_matrix.squeeze(-1),
            self.kernel_projection_matrix,
        )
        if past is None:
            options = {"shift": self.shift, "truncation": self.truncation, **as_options(mask)}
            return damped_ema(hidden_states, *parameters, self.residual_weight, **options)
        if self.truncation is not None:
            return self.truncated(hidden_states, mask, past, parameters)
        output, average = self.run(hidden_states, mask, past.average, parameters, self.residual_weight)
        past.store(average=average)
        return output

    @staticmethod
    def run(inputs, mask, state, parameters, skip=None):
        """The average over inputs that follow on `state`, and the state behind them."""
        if inputs.shape[1] > 1 or state is None:
            return damped_ema(inputs, *parameters, skip, mask=mask, initial_state=state, return_state=True)
        output, state = damped_ema_step(
            inputs[:, 0], state, *parameters, skip, mask=None if mask is None else mask[:, 0]
        )
        return output[:, None], state

    def truncated(self, inputs, mask, past, parameters):
        """The average of the last `truncation` inputs: all of them, less what is older.

        What is older is the average of the inputs delayed by `truncation`, decayed by q^truncation.
        """
        batch, length, width = inputs.shape
        wide = inputs.to(torch.promote_types(inputs.dtype, self.residual_weight.dtype))
        kept = wide if mask is None else wide.masked_fill(~mask[..., None], 0.0)
        older = wide.new_zeros(batch, self.truncation, width) if past.inputs is None else past.inputs
        recent = torch.cat((older, kept), dim=1)
        average, state = self.run(kept, None, past.average, parameters)
        *rest, projection = parameters
        projection = projection * torch.exp(self.truncation * log_decay(*parameters[:2]))
        late, forgotten = self.run(recent[:, :length], None, past.forgotten, (*rest, projection))
        past.store(average=state, forgotten=forgotten, inputs=recent[:, length:].clone())
        return nn.functional.silu(average - late + self.residual_weight * wide).to(inputs.dtype)


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
        self.rel_pos_bias = build_relative_bias(config, config.bias_positions)
        self.activation = ACT2FN[config.activation]
        self.dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.hidden_dropout = MegaDropout(config.hidden_dropout_prob, config.use_feature_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        output_weights: bool = False,
        past: MegaCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[B, T, d]` -> the same, and with `output_weights` the attention weights `[B, chunks, C, C]`.

        `mask`: `[B, T]` bool, True = keep; with `Sequences` in its place the tokens are laid end to end. With `past`
        the sequences go on from there, and it is brought up to date.
        """
        residual = hidden_states
        if self.config.normalize_before_mega:
            hidden_states = self.norm(hidden_states, mask)
        value = self.hidden_dropout(self.activation(self.v_proj(hidden_states)), mask)
        smoothed = self.dropout(self.ema_gate(hidden_states, mask, past), mask)
        update, shared, reset, candidate = self.mx_proj(smoothed).split(self.sizes, dim=-1)
        shared, reset = nn.functional.silu(shared), nn.functional.silu(reset)
        query, key = (shared * self.qk_weight[row] + self.qk_bias[row] for row in (0, 1))
        if past is not None:
            window = None if self.config.attention_chunk is None else self.config.attention_chunk - 1
            key, value, key_mask, start = past.extend(key, value, mask, window)
        if key.shape[1] == query.shape[1]:
            attended, weights = self.attend(query, key, value, mask, output_weights)
        else:
            attended, weights = self.attend_on(query, key, value, key_mask, start), None
        attended = self.dropout(self.activation(candidate + self.h_proj(attended * reset)), mask)
        # Under autocast the residual is wider than the other two, and lerp wants one dtype.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.config.normalize_before_mega:
            output = self.norm(output, mask)
        return output, weights

    def attend(self, query, key, value, mask, output_weights):
        """Attention in chunks that begin with the sequence's first token, wherever padding has put that."""
        # Only chunks, and the divisor of a causal attention without softmax, care for absolute positions.
        options, divisor = self.options(), self.config.is_decoder and self.config.attention_activation != "softmax"
        packed = isinstance(mask, Sequences)
        move = mask is not None and not packed and (options["chunk_size"] is not None or divisor)
        if move:
            query, key, value, mask, mask_in_place = *(to_front(x, mask) for x in (query, key, value, mask)), mask
        length = mask.max_seqlen if packed else query.shape[1]
        options |= {"bias": self.relative_bias(length), **as_options(mask)}
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        if output_weights:
            # Step by step, so that the output depends on the weights that are handed out.
            with torch.autocast(value.device.type, enabled=False):
                weights = attention_weights(query, key, **options)
                dropped = torch.dropout(weights.to(value.dtype), dropout, train=True)
                attended = (dropped @ into_chunks(value, options["chunk_size"])).flatten(1, 2)[:, : value.shape[1]]
        else:
            attended, weights = gated_attention(query, key, value, dropout=dropout, **options), None
        return (to_front(attended, mask_in_place, back=True) if move else attended), weights

    def options(self):
        """The arguments of the attention that the configuration fixes."""
        return {
            "function": self.config.attention_activation,
            "causal": self.config.is_decoder,
            "chunk_size": self.config.attention_chunk,
        }

    def attend_on(self, query, key, value, mask, start):
        """Causal attention of the last T of S keys, the first of which is at the position `start` `[B, 1]`."""
        new, chunk = query.shape[1], self.config.attention_chunk
        old = key.shape[1] - new
        if chunk is not None and new > 1:
            return self.attend_in_chunks(nn.functional.pad(query, (0, 0, old, 0)), key, value, mask, start)[:, old:]
        place = start + torch.arange(old, old + new, device=start.device)  # of the queries, [B, T]
        if chunk is not None:
            # A single position sees the keys of its own chunk.
            place = place % chunk
            mask = mask & (torch.arange(old + 1, device=start.device) >= old - place)
        if self.config.attention_activation != "softmax":
            # The op divides by the number of columns, which padding and the last chunk's keys are among.
            columns = torch.arange(old + 1, old + new + 1, device=start.device)
            query = query * (columns / (place + 1).clamp(min=1))[..., None].to(query.dtype)
        options = self.options() | {"bias": self.relative_bias(key.shape[1]), "chunk_size": None}
        return gated_attention(query, key, value, mask=mask, offset=old, **options)

    def attend_in_chunks(self, query, key, value, mask, start):
        """Attention in chunks of which the first began `start % chunk_size` positions before the first key."""
        chunk, length = self.config.attention_chunk, key.shape[1]
        index = torch.arange(length + chunk - 1, device=start.device) - start % chunk
        inside = (index >= 0) & (index < length)
        index = index.clamp(0, length - 1)
        query, key, value = (x.gather(1, index[..., None].expand(-1, -1, x.shape[2])) for x in (query, key, value))
        options = self.options() | {"bias": self.relative_bias(chunk), "mask": mask.gather(1, index) & inside}
        attended = gated_attention(query, key, value, **options)
        back = torch.arange(length, device=start.device) + start % chunk
        return attended.gather(1, back[..., None].expand(-1, -1, attended.shape[2]))

    def relative_bias(self, length: int) -> torch.Tensor:
        """The bias of the positions of a chunk, or of all, a vector over their differences."""
        return relative_bias(self.config, self.rel_pos_bias, self.config.attention_chunk or length)


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

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | Sequences | None) -> torch.Tensor:
        residual = hidden_states
        if self.pre_norm:
            hidden_states = self.norm(hidden_states, mask)
        hidden_states = self.hidden_dropout(self.activation(self.fc1(hidden_states)), mask)
        hidden_states = residual + self.dropout(self.fc2(hidden_states), mask)
        return hidden_states if self.pre_norm else self.norm(hidden_states, mask)


class MegaBlock(GradientCheckpointingLayer):
    """One Mega block (Figure 2): gated attention, in a decoder cross-attention, then the feed-forward layer."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.mega_layer = MegaGatedAttention(config)
        self.cross_attn = MegaGatedCrossAttention(config) if config.add_cross_attention else None
        self.nffn = MegaNormalizedFeedForwardNetwork(config) if config.use_normalized_ffn else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        output_weights: bool = False,
        past: MegaCacheLayer | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_mask: torch.Tensor | None = None,
        source: MegaCrossCacheLayer | None = None,
    ) -> torch.Tensor:
        hidden_states, _ = self.mega_layer(hidden_states, mask, output_weights, past)
        if self.cross_attn is not None:
            hidden_states, _ = self.cross_attn(
                hidden_states, mask, encoder_hidden_states, encoder_mask, output_weights, past, source
            )
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
    cache_class, seq2seq_cache_class = MegaCache, MegaSeq2SeqCache
    supports_gradient_checkpointing = True
    _no_split_modules = ["MegaBlock"]
    # The decay is a sigmoid of logits that half precision would blur (1 - q down to 1e-5).
    _keep_in_fp32_modules_strict = ["ema_gate"]
    # Placeholder buffers of the original code, with arbitrary content.
    _keys_to_ignore_on_load_unexpected = [r"rel_pos_bias\._float_tensor$"]
    _can_record_outputs = {
        "hidden_states": MegaBlock,
        "attentions": OutputRecorder(MegaGatedAttention, index=1),
        "cross_attentions": OutputRecorder(MegaGatedCrossAttention, index=1),
    }

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
        if self.config.adaptive_input_cutoffs is not None or self.config.adaptive_softmax_cutoffs is not None:
            raise NotImplementedError("an adaptive vocabulary is in bands by frequency and cannot be resized")
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
        elif isinstance(module, nn.Embedding) and config.scale_embedding:
            # Scaled by sqrt(d), the vectors have entries around 1.
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
            if module.padding_idx is not None:
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, MegaValueEmbeddings):
            init.normal_(module.weight)
            init.normal_(module.bias, std=0.1)


_FORWARD_KWARGS = {"num_items_in_batch", "output_hidden_states", "output_attentions", "position_ids"} | PACKED_BATCH


class MegaModel(MegaPreTrainedModel):
    """Mega without a head: the encoder, or with `is_decoder` the decoder of a language model."""

    def __init__(self, config: MegaConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        if config.is_encoder_decoder:
            raise ValueError(
                f"{type(self).__name__} is one side only, and the configuration has is_encoder_decoder=True: use "
                "MegaSeq2SeqModel, MegaForConditionalGeneration or their Auto classes"
            )
        self.embedding_layer = MegaEmbeddings(config)
        self.embedding_norm = MegaSequenceNorm(config, config.norm_affine) if config.embedding_norm else None
        self.embedding_dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.layers = nn.ModuleList(MegaBlock(config) for _ in range(config.num_hidden_layers))
        self.final_norm = MegaSequenceNorm(config, config.final_norm_affine) if config.final_norm else None
        self.pooler = MegaPooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def _for_auto_model(cls, config):
        """The class that `AutoModel`, which knows one for every kind of configuration, means by this one."""
        if cls is MegaModel and isinstance(config, MegaConfig) and config.is_encoder_decoder:
            from luna_mega.modeling_mega.generation_mega import MegaSeq2SeqModel

            return MegaSeq2SeqModel
        return super()

    @classmethod
    def _from_config(cls, config: MegaConfig, **kwargs) -> MegaPreTrainedModel:
        return cls._for_auto_model(config)._from_config(config, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs) -> MegaPreTrainedModel:
        model_class = cls._for_auto_model(config)
        return model_class.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

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
        past_key_values: MegaCache | MegaSeq2SeqCache | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        # Not by the name of kwargs, for which `generate` would hand the encoder what is the decoder's.
        **options: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Encode a batch of B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens (`input_type="tokens"`).
            attention_mask: `[B, T]`, 1 = keep. None = all positions, with `input_ids` all that are not `pad_token_id`.
            inputs_embeds: `[B, T, d]` embeddings in place of tokens or values.
            input_values: `[B, T]` real numbers (`input_type="values"`).
            token_type_ids: `[B, T]`, with `add_token_type_embeddings`; None = all 0.
            past_key_values: `is_decoder` only: what was returned for the positions before these. It is changed in
                place. `attention_mask` is that of the T positions, or of these and all before them.
            use_cache: `is_decoder` only: return `past_key_values`. None = `config.use_cache`, but not in training.
            encoder_hidden_states: `[B, S, d]`, `add_cross_attention` only: the source, which `past_key_values` keeps.
            encoder_attention_mask: `[B, S]`, 1 = keep; None = all. A source without a token gives attention of 0.
            options: `output_hidden_states`, `output_attentions`, `return_dict`, and of packed batches (sequences end to
                end in a row, as `DataCollatorWithFlattening` makes them) `position_ids` `[B, T]`, which rise but where
                a sequence begins and do not matter else, `seq_idx` `[B, T]`, or `cu_seq_lens_q` `[S + 1]` and
                `max_length_q`. They need `attention_mask=None`, and no cache.

        Returns:
            `last_hidden_state` `[B, T, d]` (rows at padding are meaningless), `pooler_output` `[B, d]` or None (also
            for a packed batch),
            `past_key_values` or None,
            `hidden_states` N + 1 of `[B, T, d]`, `attentions` N of `[B, chunks, C, C]`, `cross_attentions` N of
            `[B, 1, T, S]`.

        Raises:
            ValueError: not exactly one kind of input, an empty batch, a mask of another shape, a sequence longer than
                the bias table, an argument that Mega does not have.
        """
        if unknown := options.keys() - _FORWARD_KWARGS:
            raise ValueError(f"Mega models take no {', '.join(sorted(unknown))}; leave the argument out")
        if token_type_ids is not None and not self.config.add_token_type_embeddings:
            raise ValueError("this model has add_token_type_embeddings=False: leave token_type_ids out")
        past = begin_cache(self, past_key_values, use_cache)
        if past is not None and past.get_seq_length() and attention_mask is not None:
            attention_mask = attention_mask[:, -(input_ids if inputs_embeds is None else inputs_embeds).shape[1] :]
        inputs_embeds, mask = self._embed(input_ids, attention_mask, inputs_embeds, input_values)
        own, sources = past, None
        if self.config.add_cross_attention and past is not None:
            own, sources = past.self_attention_cache, past.cross_attention_cache
        encoder_mask = self._check_source(
            encoder_hidden_states, encoder_attention_mask, sources, inputs_embeds.shape[0]
        )
        output_weights = options.get("output_attentions", self.config.output_attentions)
        batch, length = inputs_embeds.shape[:2]
        restarts = options.get("position_ids") if attention_mask is None else None
        packing = self._packing((batch, length), mask, restarts, past_key_values, past, use_cache, options)
        layout, packed = mask, packing is not None and len(packing.sequences.cu_seqlens) - 1 != batch
        if packing is not None:
            past = own = sources = None  # what a decoder would have begun by default
            layout, inputs_embeds = packing.sequences, packing.pack(inputs_embeds)
            token_type_ids = None if token_type_ids is None else packing.pack(token_type_ids)
        hidden_states = self.embedding_layer(inputs_embeds, token_type_ids)
        if self.embedding_norm is not None:
            hidden_states = self.embedding_norm(hidden_states, layout)
        hidden_states = self.embedding_dropout(hidden_states, layout)
        if self.config.padded_batch_statistics and mask is not None and packing is None:
            # What the original's batch norm counts at padding.
            hidden_states = hidden_states.masked_fill(~mask[..., None], 0.0)
        if past is not None:
            if mask is None:
                layout = mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            self._check_cache(own, len(mask), output_weights)
        for index, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states,
                layout,
                output_weights,
                None if own is None else own.layers[index],
                encoder_hidden_states,
                encoder_mask,
                None if sources is None else sources.layers[index],
            )
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states, layout)
        if packing is not None:
            hidden_states = packing.unpack(hidden_states, batch, length)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_states,
            past_key_values=past,
            pooler_output=None if self.pooler is None or packed else self.pooler(first_token(hidden_states, mask)),
        )

    def _packing(self, shape, mask, position_ids, given_past, past, use_cache, options):
        """How the batch is laid out where that is not row by row."""
        weights, states = (
            options.get(name, getattr(self.config, name)) for name in ("output_attentions", "output_hidden_states")
        )
        may_unpad = self.config.unpad_inputs and past is None and not weights and not states
        packing = find_packing(shape, mask, position_ids, options, may_unpad)
        if packing is not None and not may_unpad:
            if given_past is not None or use_cache:
                raise ValueError("a packed batch has no cache: leave past_key_values out and pass use_cache=False")
            if self.config.add_cross_attention:
                raise ValueError("a decoder with add_cross_attention=True takes no packed batch: pad it")
            if weights:
                raise ValueError("a packed batch has no attention weights to return: pass output_attentions=False")
            if states and shape[0] > 1:
                raise ValueError(f"output_hidden_states=True takes a packed batch of one row, not one of {shape[0]}")
        return packing

    def _check_source(self, states, mask, sources, batch):
        """The mask of the source as bool `[B, S]`, or None; what is kept of the source already must fit."""
        if not self.config.add_cross_attention:
            if states is not None or mask is not None:
                raise ValueError("encoder_hidden_states need a decoder with add_cross_attention=True; leave them out")
            return None
        kept = None if sources is None or not sources.layers[0].is_initialized else sources.layers[0]
        if states is None and kept is None:
            raise ValueError("a decoder with add_cross_attention=True needs encoder_hidden_states [B, S, d]")
        width, length = self.config.hidden_size, (kept.keys if states is None else states).shape[1]
        if states is not None and (states.dim() != 3 or states.shape[::2] != (batch, width) or length == 0):
            raise ValueError(
                f"encoder_hidden_states must have the shape [{batch}, S, {width}], S at least 1, got "
                f"{list(states.shape)}"
            )
        if mask is not None and mask.shape != (batch, length):
            raise ValueError(f"encoder_attention_mask must have the shape {[batch, length]}, got {list(mask.shape)}")
        if kept is not None:
            expected = [(batch, length, self.config.shared_representation_size), (batch, length, width)]
            given = [tuple(tensor.shape) for tensor in (kept.keys, kept.values)]
            if given != expected or len(sources) != self.config.num_hidden_layers:
                raise ValueError(
                    f"past_key_values has another source, of another batch or model: {len(sources)} layers with keys "
                    f"and values of {given}, needed are {self.config.num_hidden_layers} with {expected}; begin with a "
                    "new cache"
                )
        return None if mask is None else drop_if_full(mask.bool())

    def _check_cache(self, past, batch, output_weights):
        config, layer = self.config, past.layers[0]
        if not layer.is_initialized:
            return
        kept = layer.seen if config.attention_chunk is None else min(layer.seen, config.attention_chunk - 1)
        expected = [
            (batch, config.hidden_size, config.ema_projection_size),
            (batch, kept, config.shared_representation_size),
            (batch, kept, config.intermediate_size),
        ]
        if config.truncation is not None:
            expected.append((batch, config.truncation, config.hidden_size))
        tensors = (layer.average, layer.keys, layer.values, layer.inputs)
        given = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
        if given != expected or len(past) != config.num_hidden_layers:
            raise ValueError(
                f"past_key_values does not fit this model and batch: {len(past)} layers with states, keys, values of "
                f"{given}, needed are {config.num_hidden_layers} with {expected} (batch size first)"
            )
        if output_weights:
            raise ValueError("output_attentions=True goes with a new cache only; pass use_cache=False for the weights")

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
        return inputs_embeds, drop_if_full(mask)


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
