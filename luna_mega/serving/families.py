# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The causal language models as a server runs them: layer by layer, over tokens of many sequences laid end to end.

A server keeps the states (`slots.py`) and decides which sequences go on. What a family has of its own is in its class;
`FAMILIES` lists them by the architecture that a configuration names.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization as init

from luna_mega.modeling_common.cache import Constants, StateLayer
from luna_mega.modeling_common.inputs import Batch
from luna_mega.modeling_common.layout import DENSE, TokenLayout
from luna_mega.modeling_luna.generation_luna import LunaForCausalLM
from luna_mega.modeling_mega.generation_mega import MegaForCausalLM
from luna_mega.modeling_megalodon.generation_megalodon import MegalodonForCausalLM
from luna_mega.serving.slots import LunaSlots, MegalodonSlots, MegaSlots, Sequences

Shapes = tuple[tuple[int, ...], ...]


class ServedModel(nn.Module):
    """A causal language model without its caches. `model`: the model itself, whose weights may be loaded later."""

    model_class: type[PreTrainedModel]
    states: int  # of a sequence in one layer
    any_length = False  # texts may be longer than the positions of the configuration

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype):
        super().__init__()
        if (reason := self.refusal(config)) is not None:
            raise ValueError(reason)
        self.config = config
        with init.no_init_weights():
            self.model = self.model_class._from_config(config, dtype=dtype).eval()
        self.model.tie_weights()
        self.constants = [Constants() for _ in range(config.num_hidden_layers)]

    @classmethod
    def refusal(cls, config: PreTrainedConfig) -> str | None:
        """Return why a model of this configuration cannot be served from slots, None where it can."""
        return None

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        """Return the shapes of the states of a sequence in one layer."""
        raise NotImplementedError

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return their dtypes, for a model of this one."""
        raise NotImplementedError

    def embed(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, d]` as the first layer takes them; `embeddings` `[tokens, E]`, `positions` `[tokens]`."""
        raise NotImplementedError

    def past(self, index: int, states: tuple[torch.Tensor, ...], sequences: Sequences) -> StateLayer:
        """Return the memory of a layer over these sequences, which is in `states`."""
        raise NotImplementedError

    def run_layer(self, index: int, hidden_states: torch.Tensor, layout: TokenLayout, past: StateLayer) -> torch.Tensor:
        """Return what a layer makes of `[B, T, d]`, and bring its memory up to date."""
        raise NotImplementedError

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, d]` behind the last layer, as `score` takes them."""
        raise NotImplementedError

    def look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens."""
        return self.model.get_input_embeddings()(input_ids)

    def advance(
        self, index: int, hidden_states: torch.Tensor, states: tuple[torch.Tensor, ...], groups: list[Sequences]
    ) -> torch.Tensor:
        """Run a layer over `[tokens, d]`: the tokens of each group of sequences, one call for each group.

        Rows behind those of all groups are padding, and come out as zeros.
        """
        parts, begin = [], 0
        for sequences in groups:
            layout = sequences.layout
            # Reading the last bound of ragged sequences would wait for the device; they are all the rest.
            end = layout.shape[1] + begin if layout.is_ragged() else begin + len(sequences.slots)
            rows = hidden_states[begin:end]
            rows = rows[None] if layout.is_ragged() else rows[:, None]
            parts.append(self.run_layer(index, rows, layout, self.past(index, states, sequences)).flatten(0, 1))
            begin = end
        if begin < len(hidden_states):
            parts.append(torch.zeros_like(hidden_states[begin:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def score(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits of `[tokens, d]`."""
        return self.model.score_tokens(hidden_states)

    def load(self, weights: dict[str, torch.Tensor]):
        """Load all weights; those that are tied need one name."""
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        lost = set(missing) - self.model.all_tied_weights_keys.keys()
        if lost or unknown:
            raise ValueError(f"the folder lacks the weights {sorted(lost)}, and has unknown ones: {sorted(unknown)}")


class ServedMega(ServedModel):
    """Mega with attention in chunks: a slot has the average, and keys and values of the chunk that is open."""

    model_class, states, any_length = MegaForCausalLM, 3, True

    @classmethod
    def refusal(cls, config: PreTrainedConfig) -> str | None:
        if config.attention_chunk is None:
            return "Mega without chunks keeps the keys of all tokens, and a slot is of constant size: set use_chunking"
        if config.truncation is not None:
            return f"truncation={config.truncation}: a slot has no place for the inputs of a truncated moving average"
        if config.adaptive_softmax_cutoffs is not None or config.adaptive_input_cutoffs is not None:
            return "an adaptive softmax or embedding is not served, as its bands depend on the tokens: use generate"
        return None

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        chunk, keys, values = config.attention_chunk, config.shared_representation_size, config.intermediate_size
        return (config.hidden_size, config.ema_projection_size), (chunk, keys), (chunk, values)

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return torch.float32, dtype, dtype

    def embed(self, embeddings, positions):
        batch = Batch(embeddings[None], None, DENSE, None, None, None, False, False)
        return self.model.mega.embed_tokens(batch)[0]

    def past(self, index, states, sequences):
        return MegaSlots(states, sequences, self.constants[index])

    def run_layer(self, index, hidden_states, layout, past):
        return self.model.mega.layers[index](hidden_states, layout, past=past)

    def finish(self, hidden_states):
        return self.model.mega.finish(hidden_states[None], DENSE)[0]


class ServedLuna(ServedModel):
    """Luna: a slot has two running means. The projected P of a layer depends on weights alone."""

    model_class, states = LunaForCausalLM, 2

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        heads, rows = config.num_attention_heads, config.projection_length
        size = config.hidden_size // heads
        return (heads, size, rows), (heads, rows, size)

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.float32

    def embed(self, embeddings, positions):
        return self.model.luna.embeddings(embeddings[None], DENSE, positions[None], with_packed=False)[0][0]

    def past(self, index, states, sequences):
        return LunaSlots(states, sequences, sequences.once("pack_queries", self.pack_queries)[index])

    def layer(self, index: int) -> nn.Module:
        """Return a layer; with `share_layers` all are one."""
        return self.model.luna.decoder.layers[0 if self.config.share_layers else index]

    def pack_queries(self) -> list[torch.Tensor]:
        """Return the projected P of each layer, `[L, H, K]`, in memory as the steps multiply it, `[H, L, K]`."""
        embeddings, count = self.model.luna.embeddings, self.config.num_hidden_layers
        attentions = [self.layer(index).attention for index in range(count)]

        def compute():
            packed, _ = embeddings.packed(embeddings.packed_embeddings.new_zeros(1, 1, self.config.hidden_size), DENSE)
            queries = (x.project_packed(rows)[0] for x, rows in zip(attentions, packed, strict=True))
            return [query.transpose(0, 1).contiguous().transpose(0, 1) for query in queries]

        weights = (w for x in (embeddings, *(x.pack_query for x in attentions)) for w in x.parameters())
        return self.constants[0].get("pack_queries", tuple(weights), compute)

    def run_layer(self, index, hidden_states, layout, past):
        return self.layer(index)(hidden_states, None, layout, past=past)[0]

    def finish(self, hidden_states):
        return self.model.luna.decoder.final_norm(hidden_states[None], [None])[0][0]


class ServedMegalodon(ServedModel):
    """Megalodon: a slot has the complex average, the chunk that is open, and the statistics of the norms over time."""

    model_class, states = MegalodonForCausalLM, 4

    @classmethod
    def refusal(cls, config: PreTrainedConfig) -> str | None:
        if config.windowed_statistics:
            return "windowed_statistics reads a long prompt twice, and a server once: set it to False, or use generate"
        if config.chunk_size % 4:
            return f"chunk_size={config.chunk_size} is no multiple of 4, and a slot with float64 statistics needs one"
        return None

    @classmethod
    def state_shapes(cls, config: PreTrainedConfig) -> Shapes:
        chunk, keys, values = config.chunk_size, config.shared_representation_size, config.value_size
        average = (config.hidden_size, config.ema_projection_size, 2)
        return average, (chunk, keys), (chunk, values), (2, 2, config.norm_num_groups)

    @classmethod
    def state_dtypes(cls, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return torch.float32, dtype, dtype, torch.float64

    def embed(self, embeddings, positions):
        return embeddings * self.model.megalodon.scale

    def past(self, index, states, sequences):
        return MegalodonSlots(states, sequences, self.constants[index])

    def run_layer(self, index, hidden_states, layout, past):
        body = self.model.megalodon
        rotation = past.sequences.once("rotation", lambda: body.rope(hidden_states, layout, past))
        hidden_states = body.layers[index](hidden_states, layout, rotation, past=past)
        # The norm behind the last block has statistics as well, which are in the slots of this block.
        return body.final_norm(hidden_states, layout, past) if body.layers[index] is body.layers[-1] else hidden_states

    def finish(self, hidden_states):
        return hidden_states


SERVED = (ServedLuna, ServedMega, ServedMegalodon)
FAMILIES: dict[str, type[ServedModel]] = {cls.model_class.__name__: cls for cls in SERVED}
