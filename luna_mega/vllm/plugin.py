"""vLLM plugin: all code that depends on the internals of vLLM, for the versions of the extra `vllm`.

The entry point of vLLM calls `register` in each of its processes. A layer is a custom operator, so that compilation
does not trace into it. Decoding does not synchronize with the device, so that it can be captured in a CUDA graph.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, VllmConfig, model as model_settings
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from luna_mega.hub.folder import position_limit
from luna_mega.modeling_common.padding_free import PaddingFreeLayout
from luna_mega.vllm.served_models import SERVED_MODELS, ServedModel
from luna_mega.vllm.slots import Sequences

OPERATOR = "vllm::luna_mega_layer"
DEFAULT_LENGTH = 32_768  # at least, for models without a limit; finite, because vLLM allocates memory for each token
MODEL_TYPES = {family.model_class.config_class.model_type for family in SERVED_MODELS.values()}
_resolve_auto_dtype = model_settings._resolve_auto_dtype


def register():
    """Register the architectures with vLLM. Further calls have no effect."""
    for name in SERVED_MODELS:
        ModelRegistry.register_model(name, f"{__name__}:{name}")
        MODELS_CONFIG_MAP[name] = SlotConfig
    MODEL_ARCH_CONFIG_CONVERTORS.update(dict.fromkeys(MODEL_TYPES, SlotArchitecture))
    model_settings._resolve_auto_dtype = resolve_auto_dtype
    if OPERATOR not in CompilationConfig._attention_ops:  # operators at which compiled programs are split
        CompilationConfig._attention_ops.append(OPERATOR)


def resolve_auto_dtype(model_type: str, config_dtype: torch.dtype, **options) -> torch.dtype:
    """Keep float32 weights for `dtype="auto"`, which vLLM converts to 16 bits before the hooks of a model run."""
    if model_type in MODEL_TYPES and config_dtype == torch.float32:
        return config_dtype
    return _resolve_auto_dtype(model_type, config_dtype, **options)


class SlotArchitecture(ModelArchConfigConvertorBase):
    """Maximum length of a sequence: the position table, or any `max_model_len` if there is none."""

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        if position_limit(self.hf_text_config) is not None:
            return super().derive_max_model_len_and_key()
        self.hf_text_config.model_max_length = sys.maxsize  # vLLM accepts a `max_model_len` up to this field
        return max(DEFAULT_LENGTH, getattr(self.hf_text_config, "max_position_embeddings", 0)), None


class SlotConfig(MambaModelConfig):
    """Check the settings of the server before the model is loaded."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        family, scheduler = SERVED_MODELS[model.architecture], vllm_config.scheduler_config
        reasons = [
            (parallel.tensor_parallel_size > 1, "tensor parallelism; set tensor_parallel_size=1"),
            (parallel.pipeline_parallel_size > 1, "pipeline parallelism; set pipeline_parallel_size=1"),
            (vllm_config.speculative_config is not None, "speculative decoding; omit it"),
            (vllm_config.lora_config is not None, "LoRA adapters; merge them into the weights"),
            (model.quantization is not None, f"quantization={model.quantization!r}; serve floating-point weights"),
            (not scheduler.enable_chunked_prefill and vllm_config.cache_config.enable_prefix_caching,
             "prefix caching without chunked prefill; set enable_chunked_prefill=True"),
        ]  # fmt: skip
        for unsupported, what in reasons:
            if unsupported:
                raise ValueError(f"{model.architecture} does not support {what}")
        if (reason := family.unsupported(model.hf_config)) is not None:
            raise ValueError(f"{model.architecture} cannot be served by vLLM: {reason}")
        super().verify_and_update_config(vllm_config)


@dataclass
class SlotMetadata(BaseMambaAttentionMetadata):
    """Metadata of a step: decoding sequences with one token each, followed by the sequences in prefill."""

    longest: int = 0  # maximum number of new tokens of a sequence

    @cached_property
    def groups(self) -> list[Sequences]:
        """Return the groups of sequences; computed in the first layer, so that CUDA graphs capture it."""
        groups, ones = [], self.num_decode_tokens
        if ones:
            before = self.seq_lens[:ones].long() - 1
            # -1 in the padding rows of a captured graph, whose slot belongs to no sequence.
            groups.append(Sequences(self.state_indices_tensor_d[:ones].flatten().long(), before.clamp(min=0)))
        if self.num_prefills:
            bounds = self.query_start_loc_p
            end = self.num_reqs
            before = self.seq_lens[end - self.num_prefills : end].long() - bounds.diff().long()
            layout = PaddingFreeLayout(bounds, self.longest, shape=(1, self.num_prefill_tokens))
            groups.append(Sequences(self.state_indices_tensor_p.long(), before, layout))
        return groups


class SlotMetadataBuilder(BaseMambaAttentionMetadataBuilder[SlotMetadata]):
    metadata_cls = SlotMetadata
    needs_causal_conv1d_metadata = False
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False, **kwargs) -> SlotMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        metadata.longest = common_attn_metadata.max_query_len
        return metadata


class SlotBackend(LinearAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "LUNA_MEGA"

    @staticmethod
    def get_builder_cls() -> type[SlotMetadataBuilder]:
        return SlotMetadataBuilder


class LayerSlots(nn.Module, MambaBase):
    """One layer with its states `kv_cache` of all sequences, which vLLM sets."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, vllm_config: VllmConfig, served: ServedModel, index: int, name: str):
        super().__init__()
        config = vllm_config.model_config
        self.shapes = served.state_shapes(config.hf_config)
        self.dtypes = served.state_dtypes(config.dtype)
        self.served = [served]  # in a list, so that it is not a submodule
        self.index, self.name, self.kv_cache = index, name, ()
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self):
        return self.shapes

    def get_state_dtype(self):
        return self.dtypes

    def get_attn_backend(self) -> type[SlotBackend]:
        return SlotBackend

    def run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer for `[tokens, d]`."""
        metadata, states = get_forward_context().attn_metadata, self.kv_cache
        if metadata is None:  # profiling of the memory, before slots are allocated
            total, device = len(hidden_states), hidden_states.device
            kinds = zip(self.shapes, self.dtypes, strict=True)
            states = tuple(torch.zeros(1, *shape, dtype=dtype, device=device) for shape, dtype in kinds)
            layout = PaddingFreeLayout(torch.tensor([0, total], device=device), total, shape=(1, total))
            zero = torch.zeros(1, dtype=torch.long, device=device)
            groups = [Sequences(zero, zero, layout)]
        else:
            groups = metadata[self.name].groups
        return self.served[0].advance(self.index, hidden_states, states, groups)


def run_layer(hidden_states: torch.Tensor, name: str) -> torch.Tensor:
    """Run the layer with this name. Its states are not arguments, as in the layers of vLLM."""
    return get_forward_context().no_compile_layers[name].run(hidden_states)


direct_register_custom_op(
    OPERATOR.split("::")[1], run_layer, fake_impl=lambda hidden_states, name: torch.empty_like(hidden_states)
)


@support_torch_compile
class ServedLayers(nn.Module):
    """The model from the embeddings to the last hidden states, which vLLM may compile."""

    def __init__(self, *, vllm_config: VllmConfig, served: ServedModel, prefix: str = ""):
        super().__init__()
        self.served = served
        count = served.config.num_hidden_layers
        self.names = [f"{prefix}.layers.{index}".lstrip(".") for index in range(count)]
        self.slots = [LayerSlots(vllm_config, served, index, name) for index, name in enumerate(self.names)]

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        embeddings = self.served.look_up(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = self.served.embed(embeddings, positions)
        for name in self.names:
            hidden_states = torch.ops.vllm.luna_mega_layer(hidden_states, name)
        return self.served.finish(hidden_states)


class SlotForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """Causal language model with the interface of vLLM. Subclasses have the names of the architectures."""

    family: type[ServedModel]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config
        self.served = self.family(config.hf_config, config.dtype)
        self.layers = ServedLayers(vllm_config=vllm_config, served=self.served, prefix=prefix)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.served.look_up(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs) -> torch.Tensor:
        return self.layers(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.served.score(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.served.load(dict(weights))
        return {name for name, _ in self.named_parameters()}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig):
        return cls.family.state_shapes(vllm_config.model_config.hf_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig):
        return cls.family.state_dtypes(vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_copy_func(cls):
        # All states are copied completely.
        return (get_temporal_copy_spec,) * len(cls.family.states)


class LunaForCausalLM(SlotForCausalLM):
    family = SERVED_MODELS["LunaForCausalLM"]


class MegaForCausalLM(SlotForCausalLM):
    family = SERVED_MODELS["MegaForCausalLM"]


class MegalodonForCausalLM(SlotForCausalLM):
    family = SERVED_MODELS["MegalodonForCausalLM"]
