"""`GenerationMixin` overrides for decoders with a recurrent state."""

from functools import wraps

import torch
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils import ModelOutput, logging

from luna_mega.compat import CACHE_NAME, accept_cache_names
from luna_mega.modeling_common.cache import check_class, new_cache
from luna_mega.modeling_common.masks import drop_if_full, find_mask, read_mask
from luna_mega.modeling_common.outputs import generated

logger = logging.get_logger(__name__)


class StateGenerationMixin(GenerationMixin):
    """Generation with the cache of the model's own class. List it among the bases of a model, as transformers reads
    from their names that a class generates."""

    _is_stateful = True  # states cannot go back, so no assisted decoding

    @accept_cache_names
    @wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs) -> torch.Tensor | ModelOutput:
        output = super().generate(*args, **kwargs)
        return generated(output) if isinstance(output, ModelOutput) else output

    def _prepare_model_inputs(self, *args, **kwargs):
        """Check prompts or sources, mask and cache, which transformers does not; find padding in sources."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        check_class(self, model_kwargs.get(CACHE_NAME))
        if inputs.shape[1] == 0:
            way_out = "give each a token, such as eos_token_id"
            if not self.config.is_encoder_decoder:
                way_out = "give each a token, or no input_ids to begin with bos_token_id"
            raise ValueError(f"the {self._inputs_name} have length 0: {way_out}")
        if not self.config.is_encoder_decoder:
            mask, past = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE_NAME)
            check_prompt(inputs, mask, past, "attention_mask", name)
            self._warn_of_right_padding(inputs, mask)
        elif name == "input_ids":
            known = (model_kwargs.get(key) for key in ("attention_mask", "encoder_outputs"))
            if all(value is None for value in known):
                model_kwargs["attention_mask"] = drop_if_full(inputs != self.config.pad_token_id)
        return inputs, name, model_kwargs

    def _warn_of_right_padding(self, inputs: torch.Tensor, mask: torch.Tensor | None):
        """Warn of padding at the end of a prompt, in the cases in which transformers does not."""
        if inputs.dim() == 2 and len(inputs) > 1 and not self.config.is_encoder_decoder:
            return
        if mask is None and inputs.dim() == 2:
            mask = find_mask(inputs, self.get_decoder().config)
        if mask is not None and not mask[:, -1].all():
            logger.warning(
                f"Right-padding was detected in the {self._prompts_name}, so that the first generated token follows a "
                "padding token. For correct results, set `padding_side='left'` in the tokenizer."
            )

    def _validate_generation_mode(self, generation_mode, generation_config: GenerationConfig, generation_mode_kwargs):
        """Refuse options that transformers would ignore here, or follow with wrong results."""
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        for name in ("cache_implementation", "cache_config", "max_cache_len"):
            if (value := getattr(generation_config, name)) not in (None, "dynamic"):
                raise ValueError(
                    f"{name}={value!r}: {type(self).__name__} keeps a cache of its own; leave the argument out"
                )
        if generation_config.compile_config is not None:
            raise ValueError(
                "compile_config: generate compiles with static caches alone; leave the argument out, or compile the "
                "model itself (torch.compile)"
            )
        if generation_config.is_assistant:
            raise ValueError(
                f"{type(self).__name__} cannot draft for another model: its state cannot forget tokens that are taken "
                "back"
            )
        guided = generation_config.guidance_scale not in (None, 1)
        if guided and generation_config.num_beams > 1:
            raise ValueError(
                f"guidance_scale with num_beams={generation_config.num_beams}: the pass without the prompt, as "
                "transformers makes it, does not follow the beams; leave one out"
            )
        if self.config.is_encoder_decoder:
            chunked, healed = generation_config.prefill_chunk_size is not None, generation_config.token_healing
            for name, asked in (("guidance_scale", guided), ("prefill_chunk_size", chunked), ("token_healing", healed)):
                if asked:
                    raise ValueError(f"{name} is for decoders without an encoder; leave the argument out")

    @property
    def _prompts_name(self) -> str:
        return "targets" if self.config.is_encoder_decoder else "prompts"

    @property
    def _inputs_name(self) -> str:
        return "sources" if self.config.is_encoder_decoder else "prompts"

    @accept_cache_names
    def prepare_inputs_for_generation(
        self, input_ids, attention_mask=None, inputs_embeds=None, tokenizer=None, **kwargs
    ):
        """Bring back the mask of a prompt that keeps everything, without which `forward` leaves padding tokens out.

        `tokenizer`: for stop strings and healed tokens, which are done by then; `forward` refuses it.
        """
        inputs = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        if attention_mask is None and not self.config.is_encoder_decoder:
            given = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            inputs["attention_mask"] = given.new_ones(given.shape[:2], dtype=torch.long)
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, mode, batch_size: int, max_cache_length: int
    ):
        """Begin a cache of the model's own class; refuse another, and inputs that are nothing but padding."""
        mask = read_mask("attention_mask", model_kwargs.get("attention_mask"))
        if mask is None:
            mask = getattr(model_kwargs.get("encoder_outputs"), "attention_mask", None)
        if mask is not None:
            filled = mask[:: len(mask) // batch_size].any(dim=1)  # every beam has the same
            if not filled.all():
                raise ValueError(
                    f"nothing but padding in the {self._inputs_name} {(~filled).nonzero().flatten().tolist()}: give "
                    "each a token, such as bos_token_id or eos_token_id"
                )
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = new_cache(self)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, max_cache_length)

    def init_continuous_batching(self, *args, **kwargs):
        """Refuse what needs a cache of keys and values alone; `generate` batches inputs of any lengths."""
        raise NotImplementedError("continuous batching needs attention caches; call generate with a padded batch")

    generate_batch = init_continuous_batching


def check_prompt(
    prompt: torch.Tensor, mask: torch.Tensor | None, past: Cache | None, mask_name: str, name: str | None
) -> None:
    """Raise `ValueError` for a prompt that the cache contains already, or a mask that does not fit to them.

    As in transformers, a prompt `[B, T]` or `[B, T, d]` contains the cached text, unless it is tokens and the mask has
    columns for the cached text and the prompt.
    """
    batch, length = prompt.shape[:2]
    seen = 0 if past is None else past.get_seq_length()
    if mask is not None and tuple(mask.shape) not in ((batch, length), (batch, seen + length)):
        raise ValueError(
            f"`{mask_name}` must have the shape {[batch, length]} of `{name}`"
            + (f", or {[batch, seen + length]} with the {seen} positions of `{CACHE_NAME}`" if seen else "")
            + f", got {list(mask.shape)}"
        )
    is_new = mask is not None and mask.shape[1] > length and prompt.dim() == 2
    if seen >= length and not is_new:
        raise ValueError(
            f"`{CACHE_NAME}` contains {seen} positions already, and `{name}` has {length}; pass the cached text with "
            f"new tokens after it, or new tokens with an `{mask_name}` of all positions, or no cache"
        )


class Seq2SeqGenerationMixin(StateGenerationMixin):
    """Generation of encoder-decoders."""

    def _prepare_decoder_input_ids_for_generation(self, *args, **kwargs):
        """Check the target, its mask and the cache, and make the mask by which transformers finds the new tokens."""
        given = kwargs.get("model_kwargs", {}).get("decoder_input_ids")
        if given is not None and given.shape[1] == 0:
            raise ValueError("`decoder_input_ids` has length 0; pass at least one token, or omit the argument")
        target, model_kwargs = super()._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        if model_kwargs.get("decoder_attention_mask") is None:
            mask = find_mask(target, self.get_decoder().config)
            model_kwargs["decoder_attention_mask"] = torch.ones_like(target) if mask is None else mask.long()
        mask, past = model_kwargs["decoder_attention_mask"], model_kwargs.get(CACHE_NAME)
        check_prompt(target, mask, past, "decoder_attention_mask", "decoder_input_ids")
        self._warn_of_right_padding(target, mask)
        return target, model_kwargs

    def _update_finished_beams(self, *, topk_log_probs, next_token_hits_stopping_criteria, early_stopping, **state):
        """Keep, with `early_stopping=True`, the first `num_beams` that are complete, as fairseq does.

        transformers lets those that complete last, where more do than there is room for, displace others.
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
