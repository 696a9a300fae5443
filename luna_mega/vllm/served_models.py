"""Causal language models for a server: layer by layer, over a padding-free batch of tokens.

The server stores the recurrent states (`slots.py`) and schedules the sequences. There is one class per model family;
`SERVED_MODELS` lists them by architecture.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization as init

from luna_mega.modeling_common.cache import Constants, StateLayer
from luna_mega.modeling_common.layout import DENSE, Layout
from luna_mega.modeling_common.padding_free import PaddingFreeLayout
from luna_mega.modeling_luna.modeling_luna import LunaForCausalLM
from luna_mega.modeling_mega.modeling_mega import MegaForCausalLM
from luna_mega.modeling_megalodon.modeling_megalodon import MegalodonForCausalLM
from luna_mega.vllm.slots import LunaSlots, MegalodonSlots, MegaSlots, Sequences

Shapes = tuple[tuple[int, ...], ...]


class ServedModel(nn.Module):
    """A causal language model without cache. The weights of `model` are loaded by `load`."""

    model_class: type[PreTrainedModel]
    states: tuple[torch.dtype | None, ...]  # dtypes of the state tensors of a layer; None = the dtype of the model

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype):
        super().__init__()
        if (reason := self.unsupported(config)) is not None:
            raise ValueError(reason)
        self.config = config
        with init.no_init_weights():
            self.model = self.model_class._from_config(config, dtype=dtype).eval()
        self.model.tie_weights()
        self.constants = [Constants() for _ in range(config.num_hidden_layers)]

    @classmethod
    def unsupported(cls, config: PreTrainedConfig) -> str | None:
        """Return the reason why a configuration is not supported, or None if it is."""
        return None

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        """Return the shapes of the state tensors of one sequence in one layer."""
        raise NotImplementedError

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the state tensors for the dtype of the model."""
        return tuple(kind or dtype for kind in cls.states)

    def embed(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the input `[tokens, d]` of the first layer for embeddings `[tokens, E]` and positions `[tokens]`."""
        raise NotImplementedError

    def layer_cache(self, index: int, states: tuple[torch.Tensor, ...], sequences: Sequences) -> StateLayer:
        """Return the cache layer of these sequences, backed by `states`."""
        raise NotImplementedError

    def run_layer(self, index: int, hidden_states: torch.Tensor, layout: Layout, cache: StateLayer) -> torch.Tensor:
        """Return the output of a layer for `[B, T, d]`, and update its states."""
        raise NotImplementedError

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the input `[tokens, d]` of `score` for the output of the last layer."""
        raise NotImplementedError

    def look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens."""
        return self.model.get_input_embeddings()(input_ids)

    def advance(
        self, index: int, hidden_states: torch.Tensor, states: tuple[torch.Tensor, ...], groups: list[Sequences]
    ) -> torch.Tensor:
        """Run a layer over `[tokens, d]`, with one call per group of sequences.

        Rows after the last group are padding, and the result is zero there.
        """
        parts, begin = [], 0
        for sequences in groups:
            layout = sequences.layout
            # Not read from `cu_seqlens`, which would synchronize with the device.
            padding_free = isinstance(layout, PaddingFreeLayout)
            end = layout.shape[1] + begin if padding_free else begin + len(sequences.slots)
            rows = hidden_states[begin:end]
            rows = rows[None] if padding_free else rows[:, None]
            parts.append(self.run_layer(index, rows, layout, self.layer_cache(index, states, sequences)).flatten(0, 1))
            begin = end
        if begin < len(hidden_states):
            parts.append(torch.zeros_like(hidden_states[begin:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def score(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits of `[tokens, d]`."""
        return self.model.score_tokens(hidden_states)

    def load(self, weights: dict[str, torch.Tensor]):
        """Load all weights. Tied weights need one name only."""
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        lost = set(missing) - self.model.all_tied_weights_keys.keys()
        if lost or unknown:
            raise ValueError(
                f"the folder lacks the weights {sorted(lost)} and has the unknown weights {sorted(unknown)}"
            )


class ServedMega(ServedModel):
    """Mega with chunked attention: a slot stores the moving average, and keys and values of the current chunk."""

    model_class, states = MegaForCausalLM, (torch.float32, None, None)

    @classmethod
    def unsupported(cls, config: PreTrainedConfig) -> str | None:
        if config.attention_chunk is None:
            return "without chunks, the cache grows with the sequence, but a slot does not; set use_chunking=True"
        if config.truncation is not None:
            return f"truncation={config.truncation}, but a slot does not store the inputs of the moving average"
        if config.adaptive_softmax_cutoffs is not None or config.adaptive_input_cutoffs is not None:
            return "the bands of an adaptive softmax or embedding depend on the tokens; use generate"
        return None

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        chunk, keys, values = config.attention_chunk, config.shared_representation_size, config.intermediate_size
        return (config.hidden_size, config.ema_projection_size), (chunk, keys), (chunk, values)

    def embed(self, embeddings, positions):
        return self.model.mega.start(embeddings[None], DENSE)[0]

    def layer_cache(self, index, states, sequences):
        return MegaSlots(states, sequences, self.constants[index])

    def run_layer(self, index, hidden_states, layout, cache):
        return self.model.mega.layers[index](hidden_states, layout, cache=cache)

    def finish(self, hidden_states):
        return self.model.mega.finish(hidden_states[None], DENSE)[0]


class ServedLuna(ServedModel):
    """Luna: a slot stores two running means. The projected P of a layer only depends on weights."""

    model_class, states = LunaForCausalLM, (torch.float32, torch.float32)

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        heads, rows = config.num_attention_heads, config.projection_length
        size = config.hidden_size // heads
        return (heads, size, rows), (heads, rows, size)

    def embed(self, embeddings, positions):
        return self.model.luna.embeddings(embeddings[None], DENSE, positions[None], with_packed=False)[0][0]

    def layer_cache(self, index, states, sequences):
        return LunaSlots(states, sequences, sequences.once("pack_queries", self.pack_queries)[index])

    def layer(self, index: int) -> nn.Module:
        """Return a layer; with `share_layers`, all layers are the same module."""
        return self.model.luna.decoder.layers[0 if self.config.share_layers else index]

    def pack_queries(self) -> list[torch.Tensor]:
        """Return the projected P `[L, H, K]` of each layer, in memory as `[H, L, K]` for the steps."""
        embeddings, count = self.model.luna.embeddings, self.config.num_hidden_layers
        attentions = [self.layer(index).attention for index in range(count)]

        def compute():
            packed, _ = embeddings.packed(embeddings.packed_embeddings.new_zeros(1, 1, self.config.hidden_size), DENSE)
            queries = (x.project_packed(rows)[0] for x, rows in zip(attentions, packed, strict=True))
            return [query.transpose(0, 1).contiguous().transpose(0, 1) for query in queries]

        weights = (w for x in (embeddings, *(x.pack_query for x in attentions)) for w in x.parameters())
        return self.constants[0].get("pack_queries", tuple(weights), compute)

    def run_layer(self, index, hidden_states, layout, cache):
        return self.layer(index)(hidden_states, None, layout=layout, cache=cache)[0]

    def finish(self, hidden_states):
        return self.model.luna.decoder.final_norm(hidden_states[None], [None])[0][0]


class ServedMegalodon(ServedModel):
    """Megalodon: a slot stores the complex moving average, the current chunk and the statistics of timestep norms."""

    model_class, states = MegalodonForCausalLM, (torch.float32, None, None, torch.float64)

    @classmethod
    def unsupported(cls, config: PreTrainedConfig) -> str | None:
        if config.windowed_statistics:
            return "windowed_statistics=True reads long prompts twice, but a server reads them once; set it to False"
        if config.chunk_size % 4:
            return f"chunk_size must be a multiple of 4 to align the float64 statistics, got {config.chunk_size}"
        return None

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        chunk, keys, values = config.chunk_size, config.shared_representation_size, config.value_size
        average = (config.hidden_size, config.ema_projection_size, 2)
        return average, (chunk, keys), (chunk, values), (2, 2, config.norm_num_groups)

    def embed(self, embeddings, positions):
        return embeddings * self.model.megalodon.scale

    def layer_cache(self, index, states, sequences):
        return MegalodonSlots(states, sequences, self.constants[index])

    def run_layer(self, index, hidden_states, layout, cache):
        body = self.model.megalodon
        rotation = cache.sequences.once("rotation", lambda: body.rope(hidden_states, layout, cache))
        hidden_states = body.layers[index](hidden_states, layout, rotation, cache=cache)
        # The statistics of the final norm are in the slots of the last block.
        return body.final_norm(hidden_states, layout, cache) if body.layers[index] is body.layers[-1] else hidden_states

    def finish(self, hidden_states):
        return hidden_states


_CLASSES = (ServedLuna, ServedMega, ServedMegalodon)
SERVED_MODELS: dict[str, type[ServedModel]] = {cls.model_class.__name__: cls for cls in _CLASSES}
