"""Mega: Moving Average Equipped Gated Attention (Ma et al. 2022, arXiv 2209.10655).

A block smooths its input with a multi-dimensional damped moving average, lets a single attention head look at the
smoothed sequence, and gates the result into the residual; attention may be confined to chunks, across which the
moving average still carries information. From top to bottom: embeddings, moving average, gated attention, feed-forward
layer, block, model. The heads are in `heads_mega.py`, language models and translation in `generation_mega.py`.

Names of modules and parameters are those of the Mega of transformers v4, so that its checkpoints load as they are.
There `damping_factor` holds the logits of the paper's alpha (weight of the input), `decay_factor` those of its delta.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from luna_mega.kernels.api import (
    TruncatedEmaState,
    damped_ema,
    damped_ema_step,
    ema_coefficients,
)
from luna_mega.modeling_common.attention import KeyWindow, attend
from luna_mega.modeling_common.base import BodyMixin, CommonPreTrainedModel, StateRecorder, exact_dtype
from luna_mega.modeling_common.cache import layer_caches
from luna_mega.modeling_common.inputs import ValueEmbeddings, embed, prepare
from luna_mega.modeling_common.layout import DENSE, Layout
from luna_mega.modeling_common.outputs import BaseModelOutputWithPoolingAndCrossAttentions
from luna_mega.modeling_common.pooling import first_token
from luna_mega.modeling_common.sharding import ShardedLayout, check_shards, raise_together
from luna_mega.modeling_common.tensor_parallel import RankBoundary
from luna_mega.modeling_mega.adaptive import MegaAdaptiveEmbedding, MegaBandProjection
from luna_mega.modeling_mega.cache_mega import MegaCache, MegaCacheLayer, MegaCrossCacheLayer, MegaSeq2SeqCache
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.cross_attention import MegaGatedCrossAttention
from luna_mega.modeling_mega.layers_mega import (
    MegaDropout,
    MegaDropPath,
    MegaRotaryRelativeBias,
    MegaScaleNorm,
    MegaSequenceNorm,
    MegaSimpleRelativeBias,
    build_relative_bias,
    relative_bias,
    restore_columns,
)
from luna_mega.modeling_mega.patches_mega import PatchEmbeddings, interpolate_positions


class MegaEmbeddings(nn.Module):
    """Tokens, real values or patches; only patches have position embeddings."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        if config.input_type == "values":
            self.value_embeddings = ValueEmbeddings(config.hidden_size)
        elif config.input_type == "patches":
            self.patch_embeddings = PatchEmbeddings(config)
            if config.use_absolute_position_embeddings:
                patches = (config.image_size // config.patch_size) ** 2
                self.position_embeddings = nn.Parameter(torch.empty(1, patches, config.hidden_size))
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

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        grid: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        hidden_states = inputs_embeds if self.scale == 1.0 else inputs_embeds * self.scale
        if hasattr(self, "projection"):
            hidden_states = self.projection(hidden_states)
        if hasattr(self, "position_embeddings"):
            positions = self.position_embeddings
            if grid is not None:
                positions = interpolate_positions(positions, grid)
            elif positions.shape[1] != hidden_states.shape[1]:
                raise ValueError(
                    f"the pictures of this model have {positions.shape[1]} patches, inputs_embeds "
                    f"{hidden_states.shape[1]}; give pixel_values, which can be of another size"
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
        rows = config.hidden_size * (2 if config.bidirectional else 1)
        states, dtype = config.ema_projection_size, exact_dtype()
        self.damping_factor = nn.Parameter(torch.empty(rows, states, 1, dtype=dtype))
        self.decay_factor = nn.Parameter(torch.empty(rows, states, 1, dtype=dtype))
        self.ema_expansion_matrix = nn.Parameter(torch.empty(rows, states, 1, dtype=dtype))
        self.kernel_projection_matrix = nn.Parameter(torch.empty(rows, states, dtype=dtype))
        self.residual_weight = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))
        self.shift, self.truncation = config.ema_shift, config.truncation

    def forward(self, hidden_states: torch.Tensor, layout: Layout, cache: MegaCacheLayer | None = None) -> torch.Tensor:
        # The names of transformers v4 and of the paper cross.
        options = {
            "input_logit": self.damping_factor.squeeze(-1),
            "damping_logit": self.decay_factor.squeeze(-1),
            "expansion": self.ema_expansion_matrix.squeeze(-1),
            "projection": self.kernel_projection_matrix,
            "skip": self.residual_weight,
        }
        if cache is None:
            options |= {"shift": self.shift, "truncation": self.truncation, **layout.options()}
            return damped_ema(hidden_states, **options)
        state = cache.average
        if self.truncation is not None and state is not None:
            state = TruncatedEmaState(cache.average, cache.forgotten, cache.inputs)
        if state is not None and hidden_states.shape[1] == 1:
            if self.truncation is None:
                options["coefficients"] = self.coefficients(cache, state.dtype)
            mask = None if layout.mask is None else layout.mask[:, 0]
            output, state = damped_ema_step(hidden_states[:, 0], state, mask=mask, **options)
            output = output[:, None]
        else:
            options |= {"truncation": self.truncation, "initial_state": state, "return_state": True}
            options |= {"lengths": layout.lengths}
            output, state = damped_ema(hidden_states, **layout.options(), **options)
        cache.store(**({"average": state} if self.truncation is None else state._asdict()))
        return output

    def coefficients(self, cache: MegaCacheLayer, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return what a step with states of this dtype needs of the parameters, kept in `cache`."""
        weights = (self.damping_factor, self.decay_factor, self.ema_expansion_matrix, self.kernel_projection_matrix)

        def compute():
            return ema_coefficients(*(x.squeeze(-1) for x in weights[:3]), weights[3], dtype=dtype)

        return cache.constants.get("average", weights, compute, dtype)


class MegaGatedAttention(nn.Module):
    """Moving average equipped gated attention (section 3.2)."""

    def __init__(self, config: MegaConfig, drop_path_rate: float = 0.0):
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
        self.whole, self.own_columns = RankBoundary(), RankBoundary()
        self.drop_path = MegaDropPath(drop_path_rate)

    @property
    def chunk_size(self) -> int | None:
        """Positions of a chunk, which may be changed in the configuration after construction; None without chunks."""
        return self.config.attention_chunk

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        output_weights: bool = False,
        cache: MegaCacheLayer | None = None,
        grid: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `[B, T, d]`, and with `output_weights` the attention weights `[B, chunks, C, C]`.

        If `cache` is given, the sequences continue from it, and it is updated. `grid`: rows and columns of patches of
        images of another size than `image_size`.
        """
        residual = hidden_states
        if self.config.normalize_before_mega:
            hidden_states = self.norm(hidden_states, layout)
        value = self.hidden_dropout(self.activation(self.v_proj(hidden_states)), layout)
        smoothed = self.dropout(self.ema_gate(hidden_states, layout, cache), layout)
        update, shared, reset, candidate = self.mx_proj(smoothed).split(self.sizes, dim=-1)
        shared, reset = nn.functional.silu(shared), self.own_columns(nn.functional.silu(reset))
        query, key = (self.whole(shared * self.qk_weight[row] + self.qk_bias[row]) for row in (0, 1))
        chunk = self.chunk_size
        window = layout.key_window(key, value, chunk) if cache is None else cache.extend(key, value, layout.mask, chunk)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        options = {"bias": self.bias(window, output_weights, cache, grid), "dropout": dropout}
        options |= {"function": self.config.attention_activation, "causal": self.config.is_decoder}
        attended, weights = attend(query, window, chunk, return_weights=output_weights, **options)
        if weights is not None and chunk is None:
            attended, weights = restore_columns(attended, weights, value, layout, layout, dropout)
        attended = self.dropout(self.activation(candidate + self.h_proj(attended * reset)), layout)
        # Before the gate, as the original has it: a sequence that is left out becomes (1 - update) * residual.
        attended = self.drop_path(attended, layout)
        # Under autocast the residual is wider than the other two, and lerp wants one dtype.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.config.normalize_before_mega:
            output = self.norm(output, layout)
        return output, weights

    def bias(
        self, window: KeyWindow, output_weights: bool, cache: MegaCacheLayer | None, grid: tuple[int, int] | None
    ) -> torch.Tensor:
        """Return the bias of a chunk, or of all positions, a vector over their differences.

        A step reuses the bias of the cache: of more positions than necessary, so that it is rarely computed again.
        """
        length, chunk = window.length(), self.chunk_size
        if not window.step or output_weights:
            # Later queries of a chunk may be at any position of it.
            length = length if window.offset == 0 or chunk is None else chunk
            return self.whole(self.relative_bias(length, grid))
        if chunk is not None:
            length = self.chunk_positions(2 ** max(6, (length - 1).bit_length()))
        elif isinstance(self.rel_pos_bias, MegaRotaryRelativeBias):
            length = max(length, cache.keys.shape[1])
        weights = tuple(self.rel_pos_bias.parameters())
        return cache.constants.get("bias", weights, lambda: self.whole(self.relative_bias(length)), length)

    def chunk_positions(self, length: int) -> int:
        """Return the number of positions of a chunk whose bias sequences of up to `length` positions use."""
        if isinstance(self.rel_pos_bias, MegaSimpleRelativeBias) or torch.compiler.is_compiling():
            return self.chunk_size  # a table has them all, and a program supports every length
        return min(self.chunk_size, length)

    def relative_bias(self, length: int, grid: tuple[int, int] | None = None) -> torch.Tensor:
        """Return the bias of `length` positions, or with chunks of those in one chunk."""
        if self.chunk_size is not None:
            length, grid = self.chunk_positions(length), None
        return relative_bias(self.config, self.rel_pos_bias, length, grid)


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
    """One Mega block (Figure 2): gated attention, in a decoder cross-attention, then the feed-forward layer."""

    def __init__(self, config: MegaConfig, drop_path_rate: float = 0.0):
        super().__init__()
        self.mega_layer = MegaGatedAttention(config, drop_path_rate)
        self.cross_attn = MegaGatedCrossAttention(config) if config.add_cross_attention else None
        self.nffn = MegaNormalizedFeedForwardNetwork(config, drop_path_rate) if config.use_normalized_ffn else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        output_weights: bool = False,
        cache: MegaCacheLayer | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_layout: Layout = DENSE,
        cross_cache: MegaCrossCacheLayer | None = None,
        grid: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        hidden_states, _ = self.mega_layer(hidden_states, layout, output_weights, cache, grid)
        if self.cross_attn is not None:
            hidden_states, _ = self.cross_attn(
                hidden_states, layout, encoder_hidden_states, encoder_layout, output_weights, cache, cross_cache
            )
        return hidden_states if self.nffn is None else self.nffn(hidden_states, layout)


class MegaOutputProjection(nn.Module):
    """A linear layer and SiLU at every position."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.dense(hidden_states))


class MegaPooler(nn.Module):
    """The first token through a dense layer with tanh."""

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(first))


class MegaPreTrainedModel(CommonPreTrainedModel):
    """Base of the Mega models: configuration, initialization and what transformers asks of a model."""

    config_class = MegaConfig
    config: MegaConfig
    base_model_prefix = "mega"
    cache_class, seq2seq_cache_class = MegaCache, MegaSeq2SeqCache
    _no_split_modules = ["MegaBlock"]
    # The decay is a sigmoid of logits that half precision would blur (1 - q down to 1e-5).
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

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Resize a vocabulary that is not adaptive."""
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
        elif isinstance(module, MegaBandProjection):
            init.normal_(module.weight, std=std)
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
        elif isinstance(module, nn.Conv2d):  # of patches
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, MegaEmbeddings) and hasattr(module, "position_embeddings"):
            init.trunc_normal_(module.position_embeddings, std=config.hidden_size**-0.5)
        elif isinstance(module, ValueEmbeddings):
            init.normal_(module.weight)
            init.normal_(module.bias, std=0.1)


class MegaModel(BodyMixin, MegaPreTrainedModel):
    """Mega without a head: the encoder, or with `is_decoder` the decoder of a language model."""

    embeddings_name = "embedding_layer"

    def __init__(self, config: MegaConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.closes_gaps = config.input_type != "patches"  # patches keep their places in the image
        self.embedding_layer = MegaEmbeddings(config)
        self.embedding_norm = MegaSequenceNorm(config, config.norm_affine) if config.embedding_norm else None
        dropout = 0.0 if config.input_type == "patches" else config.dropout_prob
        self.embedding_dropout = MegaDropout(dropout, config.use_feature_dropout)
        rates = torch.linspace(0.0, config.drop_path_rate, config.num_hidden_layers, device="cpu").tolist()
        self.layers = nn.ModuleList(MegaBlock(config, rate) for rate in rates)
        self.recorder = StateRecorder()
        self.final_norm = MegaSequenceNorm(config, config.final_norm_affine) if config.final_norm else None
        self.output_projection = MegaOutputProjection(config) if config.output_projection else None
        self.pooler = MegaPooler(config) if add_pooling_layer and config.input_type != "patches" else None
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def input_width(self) -> int:
        config = self.config
        projects = config.input_type == "tokens" and config.adaptive_input_cutoffs is None
        return config.embedding_size if projects else config.hidden_size

    def check_shards(self, layout: ShardedLayout) -> None:
        config = self.config
        check_shards(layout, config.attention_chunk, config.truncation, config.padded_batch_statistics)

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
        cp_group: "dist.ProcessGroup | None" = None,
        pixel_values: torch.FloatTensor | None = None,
        interpolate_pos_encoding: bool = False,
        # Not by the name of kwargs, for which `generate` would hand the encoder what is the decoder's.
        **options: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Encode a batch of B sequences of T positions.

        Args:
            input_ids: `[B, T]` tokens (`input_type="tokens"`).
            attention_mask: `[B, T]`, 1 = keep, 0 = drop; None = all positions, with `input_ids` all that are not
                `pad_token_id`. Dropped positions do not exist, also between others (but patches keep their positions);
                their inputs can be anything, also NaN. Values other than 0 and 1 raise an error on a CPU outside of
                compiled and exported programs; elsewhere all but 0 keep.
            inputs_embeds: `[B, T, d]` embeddings in place of tokens, values or patches.
            input_values: `[B, T]` real numbers (`input_type="values"`).
            token_type_ids: `[B, T]`, with `add_token_type_embeddings`; None = all 0.
            past_key_values: `is_decoder` only: what was returned for the positions before these. It is changed in
                place. `attention_mask` covers the T positions, or these and all before them.
            use_cache: `is_decoder` only: return `past_key_values`. None = `config.use_cache`, but not in training.
            encoder_hidden_states: `[B, S, d]`, `add_cross_attention` only: the source, which `past_key_values` keeps.
            encoder_attention_mask: `[B, S]`, 1 = keep; None = all. A source without a token gives attention of 0.
            cp_group: the ranks that share the B sequences. Each passes its contiguous part of them, in the order of
                ranks, as `shard_sequence` cuts them (at chunks of attention, where there are any); T is the length of
                the part, and may differ from rank to rank. Outputs at positions belong to the part. Gradients come
                from the sum of all ranks' losses; see "Context parallelism" in docs/distributed.md. Not with a cache,
                cross-attention, a truncation, attention weights nor a ragged batch.
            pixel_values: `[B, C, H, W]` pictures (`input_type="patches"`); their patches, row after row, are the T
                positions.
            interpolate_pos_encoding: take pictures of any size that is a multiple of the patches, by interpolating the
                embeddings of positions (bicubic) and the table of a simple bias.
            options: `output_hidden_states`, `output_attentions`, `return_dict`, and of ragged batches (sequences
                end to end in a row, as `DataCollatorWithFlattening` makes them) `position_ids` `[B, T]`, which rise
                but where a sequence begins, `seq_idx` `[B, T]`, or `cu_seq_lens_q` `[S + 1]` and `max_length_q`
                (`cu_seq_lens_k` and `max_length_k` must be the same). They go without a cache, and all but `seq_idx`
                without an `attention_mask`. Beside a mask, `position_ids` are those that it has where it keeps,
                `attention_mask.cumsum(1) - 1`, with a cache the last of them.

        Returns:
            `last_hidden_state` `[B, T, d]` (rows at padding are meaningless), `pooler_output` `[B, d]` or None (also
            for a ragged batch),
            `past_key_values` or None,
            `hidden_states` N + 1 of `[B, T, d]`, `attentions` N of `[B, chunks, C, C]`, `cross_attentions` N of
            `[B, 1, T, S]`.

        Raises:
            ValueError: not exactly one kind of input, an empty batch, a mask of another shape, a mask with other values
                than 0 and 1, a sequence longer than the bias table, an argument that Mega does not have.
        """
        grid = None
        if pixel_values is not None:
            with raise_together(cp_group, pixel_values.device):
                grid = self.find_grid(pixel_values, interpolate_pos_encoding)
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
            past_key_values=past_key_values,
            use_cache=use_cache,
            options=options,
            cp_group=cp_group,
        )
        layout, encoder = inputs.layout, (inputs.encoder_hidden_states, inputs.encoder_layout)
        if token_type_ids is not None:
            token_type_ids = layout.gather(token_type_ids)
        hidden_states = self.start(embed(self, inputs), layout, token_type_ids, grid)
        recorded = layout.scatter(hidden_states) if inputs.output_states else None
        caches = [(None, None)] * len(self.layers)
        if inputs.past_key_values is not None:
            caches = layer_caches(inputs.cache, inputs.cross_cache, len(self.layers))
        for layer, (cache, cross_cache) in zip(self.layers, caches, strict=True):
            if recorded is not None:
                hidden_states = layout.gather(recorded)
            hidden_states = layer(hidden_states, layout, inputs.output_weights, cache, *encoder, cross_cache, grid)
            if recorded is not None:
                recorded = self.recorder(recorded, layout.scatter(hidden_states))
        hidden_states = layout.scatter(self.finish(hidden_states, layout))
        pooled = None
        if self.pooler is not None and layout.has_rows():
            pooled = self.pooler(first_token(hidden_states, inputs.mask, layout.reductions))
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_states,
            cache=inputs.past_key_values,
            pooler_output=pooled,
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens, of real values or of patches."""
        return getattr(self.embedding_layer, self._input_embed_layer)

    def find_grid(self, pixel_values: torch.Tensor, interpolate: bool) -> tuple[int, int]:
        """Return the rows and columns of patches of images; raise `ValueError` unless the model supports them."""
        if self.config.input_type != "patches":
            raise ValueError(f"`pixel_values` require input_type='patches', got {self.config.input_type!r}; omit them")
        return self.get_input_embeddings().find_grid(pixel_values, interpolate)

    def start(
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
        # The batch norm of the original includes padding, whose states are then 0.
        return layout.clear_padding(hidden_states) if self.config.padded_batch_statistics else hidden_states

    def finish(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the states behind the last layer, `[B, T, d]`, as heads read them."""
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states, layout)
        return hidden_states if self.output_projection is None else self.output_projection(hidden_states)


__all__ = ["MegaModel", "MegaPreTrainedModel"]
