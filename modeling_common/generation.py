"""`GenerationMixin` overrides for decoders with a recurrent state."""

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from luna_mega.modeling_common.base import CommonPreTrainedModel, accept_past_key_values
from luna_mega.modeling_common.cache import check_class, keep_derived, new_cache
from luna_mega.modeling_common.masks import drop_if_full, find_mask, find_target_mask, to_bool_mask
from luna_mega.modeling_common.outputs import CACHE

logger = logging.get_logger(__name__)

if TYPE_CHECKING:

    class GenerativeMixin(CommonPreTrainedModel, GenerationMixin):
        """Base of the mixins; at runtime the family's `PreTrainedModel` follows them."""
else:
    GenerativeMixin = GenerationMixin


class StateGenerationMixin(GenerativeMixin):
    """Generation with the cache class of the model.

    A model must list the mixin as a direct base: transformers checks the names of the bases.
    """

    _is_stateful = True  # recurrent states cannot be rolled back, so assisted decoding is not supported

    @accept_past_key_values
    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; values of decoding steps that only depend on weights are computed once."""
        parent: Any = super()
        if "cache" in kwargs:
            kwargs[CACHE] = kwargs.pop("cache")
        with keep_derived(kwargs.get("custom_generate") is None):  # such a function may change weights
            return parent.generate(*args, **kwargs)

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, str | None, dict[str, Any]]:
        """Check prompts or sources together with their mask and cache, and infer the mask of sources."""
        parent: Any = super()
        inputs, name, model_kwargs = parent._prepare_model_inputs(*args, **kwargs)
        check_class(self, model_kwargs.get(CACHE))
        if inputs.shape[1] == 0:
            fix = "pass at least one token, such as eos_token_id"
            if not self.config.is_encoder_decoder:
                fix = "pass at least one token, or omit input_ids to start from bos_token_id"
            raise ValueError(f"the {self._inputs_name} have length 0; {fix}")
        if not self.config.is_encoder_decoder:
            mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
            check_prompt(inputs, mask, cache, "attention_mask", name)
            self._warn_of_right_padding(inputs, mask)
        elif name == "input_ids":
            mask_sources = (model_kwargs.get(key) for key in ("attention_mask", "encoder_outputs"))
            if all(value is None for value in mask_sources):
                model_kwargs["attention_mask"] = drop_if_full(find_mask(inputs, self.get_encoder().config))
        return inputs, name, model_kwargs

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """Let transformers warn of long texts only if `longest_input` limits the number of positions."""
        parent: Any = super()
        criteria = parent._get_stopping_criteria(*args, **kwargs)
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria):
                criterion.max_position_embeddings = self.get_decoder().config.longest_input
        return criteria

    def _warn_of_right_padding(self, inputs: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Warn about padding at the end of a prompt in the cases in which transformers does not warn."""
        if inputs.dim() == 2 and len(inputs) > 1 and not self.config.is_encoder_decoder:
            return
        if mask is None and inputs.dim() == 2:
            mask = find_mask(inputs, self.get_decoder().config)
        if mask is not None and not mask[:, -1].all():
            prompts = "targets" if self.config.is_encoder_decoder else "prompts"
            logger.warning(
                f"Right-padding was detected in the {prompts}, so that the first generated token follows a "
                "padding token. For correct results, set `padding_side='left'` in the tokenizer."
            )

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        """Raise `ValueError` for options that would have no effect or give wrong results."""
        parent: Any = super()
        parent._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static") or generation_config.cache_config is not None:
            name, value = "cache_implementation", kind
            if kind in (None, "dynamic", "static"):
                name, value = "cache_config", generation_config.cache_config
            raise ValueError(
                f"{name}={value!r} is not supported: {type(self).__name__} has its own cache; omit the argument, or "
                "pass cache_implementation='static'"
            )
        if (length := generation_config.max_cache_len) is not None and kind != "static":
            raise ValueError(f"max_cache_len={length!r} requires cache_implementation='static'; omit it or pass both")
        if kind == "static" and generation_config.use_cache is False:
            raise ValueError("cache_implementation='static' requires use_cache=True; omit one of them")
        if generation_config.compile_config is not None:
            raise ValueError(
                "`compile_config` is not supported; omit the argument, or compile the model with torch.compile"
            )
        if generation_config.is_assistant:
            raise ValueError(
                f"{type(self).__name__} cannot be an assistant model: rejected tokens cannot be removed from its state"
            )
        guided = generation_config.guidance_scale not in (None, 1)
        if guided and generation_config.num_beams > 1:
            raise ValueError(
                f"`guidance_scale` is not supported with num_beams={generation_config.num_beams}: transformers does "
                "not reorder the unconditional pass; omit one of them"
            )
        if self.config.is_encoder_decoder:
            chunked, healed = generation_config.prefill_chunk_size is not None, generation_config.token_healing
            for name, flag in (("guidance_scale", guided), ("prefill_chunk_size", chunked), ("token_healing", healed)):
                if flag:
                    raise ValueError(f"`{name}` is not supported by encoder-decoders; omit the argument")

    @property
    def _inputs_name(self) -> str:
        return "sources" if self.config.is_encoder_decoder else "prompts"

    @accept_past_key_values
    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Add a mask of ones if none is given: `forward` would infer one from padding tokens.

        `tokenizer` is accepted and ignored, because `generate` passes it for stop strings and token healing.
        """
        if "cache" in kwargs:
            kwargs[CACHE] = kwargs.pop("cache")
        inputs = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        if attention_mask is None and not self.config.is_encoder_decoder:
            tensor = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            inputs["attention_mask"] = tensor.new_ones(tensor.shape[:2], dtype=torch.long)
        return inputs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Create a cache.

        Raise `ValueError` for a cache of another class, and for inputs that contain only padding.
        """
        mask = to_bool_mask("attention_mask", model_kwargs.get("attention_mask"))
        if mask is None:
            mask = getattr(model_kwargs.get("encoder_outputs"), "attention_mask", None)
        if mask is not None:
            nonempty = mask[:: len(mask) // batch_size].any(dim=1)  # all beams of an input have the same mask
            if not nonempty.all():
                raise ValueError(
                    f"the {self._inputs_name} {(~nonempty).nonzero().flatten().tolist()} contain only padding; pass at "
                    "least one token each, such as bos_token_id or eos_token_id"
                )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            cache: Any = new_cache(self)
            model_kwargs[CACHE] = cache
            if generation_config.cache_implementation == "static":
                cache.static_length = max(max_cache_length, generation_config.max_cache_len or 0)
        else:
            parent: Any = super()
            parent._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, max_cache_length)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **options: Any
    ) -> Any:
        """Make the cache static after the prompt, with `cache_implementation="static"`."""
        parent: Any = super()
        model_kwargs = parent._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **options)
        cache: Any = model_kwargs.get(CACHE)
        if getattr(cache, "static_length", None) is not None and not cache.is_static:
            cache.make_static(cache.static_length)
        return model_kwargs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `NotImplementedError`: continuous batching of transformers requires a cache of only keys and values."""
        raise NotImplementedError("continuous batching requires a key-value cache; call generate with a padded batch")

    generate_batch = init_continuous_batching


def check_prompt(
    prompt: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None, mask_name: str, name: str | None
) -> None:
    """Raise `ValueError` for a prompt that the cache contains already, or a mask that does not fit prompt and cache.

    As in transformers, a prompt `[B, T]` or `[B, T, d]` includes the cached text. A prompt of tokens may exclude the
    cached text; the mask then has columns for both.
    """
    batch, length = prompt.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    if mask is not None and tuple(mask.shape) not in ((batch, length), (batch, past + length)):
        raise ValueError(
            f"`{mask_name}` must have the shape {[batch, length]} of `{name}`"
            + (f", or {[batch, past + length]} with the {past} positions of `cache`" if past else "")
            + f", got {list(mask.shape)}"
        )
    is_new = mask is not None and mask.shape[1] > length and prompt.dim() == 2
    if past >= length and not is_new:
        raise ValueError(
            f"`cache` contains {past} positions already, and `{name}` has {length}; pass the cached text with "
            f"new tokens after it, or new tokens with an `{mask_name}` of all positions, or no cache"
        )


class Seq2SeqGenerationMixin(StateGenerationMixin):
    """Generation of encoder-decoders."""

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Check the target, its mask and the cache, and create the mask to which transformers appends new tokens."""
        decoder_input_ids = kwargs.get("model_kwargs", {}).get("decoder_input_ids")
        if decoder_input_ids is not None and decoder_input_ids.shape[1] == 0:
            raise ValueError("`decoder_input_ids` has length 0; pass at least one token, or omit the argument")
        parent: Any = super()
        target, model_kwargs = parent._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        if model_kwargs.get("decoder_attention_mask") is None:
            mask = find_target_mask(target, self.get_decoder().config)
            model_kwargs["decoder_attention_mask"] = torch.ones_like(target) if mask is None else mask.long()
        mask, cache = model_kwargs["decoder_attention_mask"], model_kwargs.get(CACHE)
        check_prompt(target, mask, cache, "decoder_attention_mask", "decoder_input_ids")
        self._warn_of_right_padding(target, mask)
        return target, model_kwargs

    def _update_finished_beams(  # type: ignore[override]
        self,
        *,
        topk_log_probs: torch.Tensor,
        next_token_hits_stopping_criteria: torch.Tensor,
        early_stopping: bool | str,
        **state: Any,
    ) -> Any:
        """With `early_stopping=True`, keep the first `num_beams` finished beams, as fairseq does.

        In transformers, beams that finish in the last step can replace others.
        """
        if early_stopping is True:
            complete = next_token_hits_stopping_criteria & state["top_num_beam_mask"]
            order = topk_log_probs.masked_fill(~complete, float("-inf")).argsort(dim=1, descending=True)
            room = (~state["is_sent_finished"]).sum(dim=1, keepdim=True)
            next_token_hits_stopping_criteria = complete & (order.argsort(dim=1) < room)
        return super()._update_finished_beams(
            topk_log_probs=topk_log_probs,
            next_token_hits_stopping_criteria=next_token_hits_stopping_criteria,
            early_stopping=early_stopping,
            **state,
        )
