"""Generic encoder-decoders: the model without a head, and the language model."""

from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils.generic import ModelOutput, can_return_tuple

from luna_mega.modeling_common.arguments import HeadKwargs
from luna_mega.modeling_common.base import ModelMixin, accept_past_key_values
from luna_mega.modeling_common.cache import keeps_cache
from luna_mega.modeling_common.heads import LMHead, checked_loss
from luna_mega.modeling_common.labels import (
    check_ids,
    check_token_labels,
    ignore_dropped,
    keep_positions,
    shift_right,
)
from luna_mega.modeling_common.masks import drop_if_full, find_mask, find_target_mask, to_bool_mask
from luna_mega.modeling_common.outputs import Seq2SeqLMOutput, Seq2SeqModelOutput, cache_field


class EncoderDecoder(ModelMixin):
    """Base of the models with an encoder and a decoder."""

    def __init__(self, config: Any):
        if getattr(config, "side_class", None) is None:
            needed = cast(type, self.config_class).__name__
            raise ValueError(f"{type(self).__name__} requires a {needed}, got a {type(config).__name__}")
        super().__init__(config)

    def share_modules(self) -> None:
        """Use one module for shared embeddings, because FSDP2 does not support a weight in two modules."""
        if self.config.shares_embeddings:
            self.get_decoder().set_input_embeddings(self.get_encoder().get_input_embeddings())

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the common vocabulary of source and target in encoder and decoder."""
        config = self.config
        if config.decoder_vocab_size not in (None, config.vocab_size):
            raise NotImplementedError(
                f"source and target have different vocabularies of {config.vocab_size} and {config.decoder_vocab_size} "
                "tokens, so that one new size is ambiguous; build a model with the new sizes and copy the rows"
            )
        if not config.shares_embeddings:
            self.get_decoder().resize_token_embeddings(*args, **kwargs)
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if config.decoder_vocab_size is not None:
            config.decoder_vocab_size = config.vocab_size
        return embeddings


class Seq2SeqBody(EncoderDecoder):
    """Encoder-decoder without a head: two models of one family, `encoder` and `decoder`.

    Classes of a family can override `read_outputs`, `decoder_inputs` and `make_output`.
    """

    encoder_output_class: Any
    body_output_class: Any = Seq2SeqModelOutput

    def __init__(self, config: Any):
        super().__init__(config)
        if not config.shares_embeddings:
            self._tied_weights_keys = {}
        self.encoder, self.decoder = (self.body_class(side, **self.body_options) for side in config.sides)
        self.decoder.reads_target, self.encoder.returns_mask = True, self.encoder.packs
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)
        if self.config.shares_embeddings:
            self.decoder.set_input_embeddings(value)

    @accept_past_key_values
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        *,
        encoder_outputs: ModelOutput | tuple[torch.Tensor, ...] | None = None,
        cache: EncoderDecoderCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode B sources of S positions, and run the decoder over T positions of targets.

        Args:
            input_ids: `[B, S]`, tokens of the source.
            attention_mask: `[B, S]`, 1 = keep, 0 = drop. None = the mask of `encoder_outputs` if it has one, else all
                positions, with `input_ids` all that are not `pad_token_id`.
            decoder_input_ids: `[B, T]`, tokens of the target, which starts with `decoder_start_token_id`.
            decoder_attention_mask: `[B, T]`, mask of the target. None = all positions, with `decoder_input_ids` all
                that are not `pad_token_id`, except a `decoder_start_token_id` before the first other token.
            encoder_outputs: outputs of the encoder, instead of a source.
            cache: cache of the previous positions, which is updated in place. It contains the source.
            inputs_embeds: `[B, S, d]`, embeddings instead of `input_ids`.
            decoder_inputs_embeds: `[B, T, d]`, embeddings instead of `decoder_input_ids`.
            use_cache: return a cache. None = `config.use_cache`, except in training.
            kwargs: `output_hidden_states`, `output_attentions`, `return_dict`, `token_type_ids` `[B, S]` of the source,
                and options of the decoder.

        Returns:
            `last_hidden_state` `[B, T, d]`, the cache or None, `encoder_last_hidden_state` `[B, S, d]` (undefined at
            padding), and if requested `decoder_hidden_states`, `decoder_attentions`, `cross_attentions`,
            `encoder_hidden_states` and `encoder_attentions`, a tensor for each layer.

        Raises:
            ValueError: The errors of encoder and decoder; not exactly one kind of target; `position_ids`; or
                `encoder_outputs` of another encoder.
        """
        options = self.read_options({**kwargs}, use_cache, decoder_input_ids, decoder_inputs_embeds)
        source = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        encoded, source_mask = self.encode(source, self.read_outputs(encoder_outputs), cache, options)
        own = self.decoder_inputs(encoded, options)
        decoded = self.decoder(
            decoder_input_ids,
            to_bool_mask("decoder_attention_mask", decoder_attention_mask),
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=source_mask,
            cache=cache,
            **own,
            **options,
        )
        return self.make_output(encoded, decoded)

    def read_options(
        self, options: dict[str, Any], use_cache: bool | None, *targets: torch.Tensor | None
    ) -> dict[str, Any]:
        """Return `options` of encoder and decoder with defaults, after checking that one of the `targets` is given."""
        if options.pop("position_ids", None) is not None:
            raise ValueError(
                "`position_ids` is ambiguous for an encoder-decoder; omit it (Luna has `decoder_position_ids`)"
            )
        if options.get("encoder_hidden_states") is not None:
            raise ValueError("an encoder-decoder has no `encoder_hidden_states`; pass them as `encoder_outputs`")
        if sum(target is not None for target in targets) != 1:
            raise ValueError("pass exactly one of decoder_input_ids and decoder_inputs_embeds")
        if use_cache is None:
            use_cache = keeps_cache(self)
        output_options = {name: getattr(self.config, name) for name in ("output_hidden_states", "output_attentions")}
        return output_options | options | {"use_cache": use_cache, "return_dict": True}

    def encode(
        self,
        source: dict[str, torch.Tensor | None],
        encoded: Any,
        cache: EncoderDecoderCache | None,
        options: dict[str, Any],
    ) -> tuple[Any, torch.Tensor | None]:
        """Return the outputs of the encoder, and the mask of the source for the decoder, `[B, S]` or None = all.

        Args:
            source: `input_ids`, `attention_mask` and `inputs_embeds`.
            encoded: outputs of the encoder instead of a source, or None.
            cache: cache of the decoder; if it is filled, neither a source nor `encoded` is required.
            options: see `read_options`; `token_type_ids` are removed.
        """
        mask = source["attention_mask"] = to_bool_mask("attention_mask", source["attention_mask"])
        source = source | {"token_type_ids": options.pop("token_type_ids", None)}
        has_source = source["input_ids"] is not None or source["inputs_embeds"] is not None
        if encoded is None and not has_source and isinstance(cache, EncoderDecoderCache) and cache.get_seq_length() > 0:
            encoded = self.encoder_output_class()
        elif encoded is None:
            output_options = {name: value for name, value in options.items() if name.startswith("output_")}
            encoded = self.encoder(**source, return_dict=True, **output_options)
        if mask is None:
            mask = getattr(encoded, "attention_mask", None)
        if mask is None and source["input_ids"] is not None:
            mask = drop_if_full(find_mask(source["input_ids"], self.encoder.config))
        return encoded, mask

    def read_outputs(self, outputs: ModelOutput | tuple[torch.Tensor, ...] | None) -> Any:
        """Return `encoder_outputs` as an `encoder_output_class`, or None.

        A tuple has the states and the mask, which can be omitted, then the recorded states and attention weights.
        """
        if outputs is None or isinstance(outputs, ModelOutput):
            return outputs
        if not outputs:
            return None
        tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
        recorded = [x for x in outputs if isinstance(x, tuple)]
        named = dict(zip(("last_hidden_state", "attention_mask"), tensors, strict=False))
        return self.encoder_output_class(**named, **dict(zip(("hidden_states", "attentions"), recorded, strict=False)))

    def decoder_inputs(self, encoded: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Return more arguments of the decoder; remove from `options` those that the decoder names differently."""
        return {}

    def make_output(self, encoded: Any, decoded: Any, **fields: Any) -> Seq2SeqModelOutput:
        """Return the outputs of encoder and decoder in one output, with further `fields` of `body_output_class`."""
        return self.body_output_class(
            last_hidden_state=decoded.last_hidden_state,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
            **cache_field(decoded.cache),
            **fields,
        )


class Seq2SeqLM(EncoderDecoder, LMHead):
    """Encoder-decoder with an output layer. Classes of a family set `body_class` and `output_class`."""

    body_options = {}
    loss_kind = "ForMaskedLM"  # each position has its own label
    _tied_weights_keys: dict[str, str]

    def make_head(self, config: Any) -> None:
        if config.shares_embeddings:  # the output layer is then tied to the embedding of the encoder
            tied = {name: other.replace(".decoder.", ".encoder.") for name, other in self._tied_weights_keys.items()}
            self._tied_weights_keys = tied
        self.lm_head = nn.Linear(config.decoder_config.hidden_size, config.decoder_config.vocab_size, bias=False)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return decoder inputs `[B, T]` for labels `[B, T]`, see `shift_right`."""
        if self.config.pad_token_id is None:
            raise ValueError("`config.pad_token_id` is None; set it, or pass `labels` without `decoder_input_ids`")
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)[0]

    @accept_past_key_values
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        *,
        encoder_outputs: ModelOutput | tuple[torch.Tensor, ...] | None = None,
        cache: EncoderDecoderCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[HeadKwargs],
    ) -> Seq2SeqLMOutput:
        """Predict the tokens of the target from the inputs of the model without a head.

        `labels` `[B, T]` are the tokens of the target including its end, -100 = not counted. If no other target is
        given, the decoder inputs are the shifted labels. `logits` are `[B, T, target vocabulary]`, restricted to the
        last `logits_to_keep` positions or to the positions in `logits_to_keep` if it is a tensor.

        Raises:
            ValueError: As in the model without a head, and if labels do not match the positions of `logits_to_keep`.
        """
        if labels is not None:
            filled = isinstance(cache, EncoderDecoderCache) and cache.get_seq_length() > 0
            decoder_input_ids, decoder_attention_mask = self.read_target(
                labels, decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds, logits_to_keep, filled
            )
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden_states, loss = keep_positions(outputs.last_hidden_state, logits_to_keep), None
        logits = self.lm_head(hidden_states)
        if labels is not None:
            mask = decoder_attention_mask
            if mask is not None:
                mask = keep_positions(mask[:, -outputs.last_hidden_state.shape[1] :], logits_to_keep)
            targets = ignore_dropped(labels, mask).contiguous()
            options = {"logits": logits, "labels": targets, "vocab_size": logits.shape[-1], **kwargs}
            loss = checked_loss(lambda: self.loss_function(**options), targets, logits.shape[-1])
        return self.output_class(loss=loss, logits=logits, **self.carried_over(outputs))

    def read_target(
        self,
        labels: torch.Tensor,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
        filled: bool,
    ) -> tuple[Any, torch.Tensor | None]:
        """Check the labels, and return tokens and bool mask of the target; without a target, those of the labels.

        `filled` is whether the cache has earlier positions of the target.
        """
        attention_mask = to_bool_mask("decoder_attention_mask", attention_mask)
        target = input_ids if inputs_embeds is None else inputs_embeds
        if target is not None:
            check_token_labels(target, logits_to_keep, labels=labels)
            if attention_mask is None and input_ids is not None:
                find = find_mask if filled else find_target_mask
                attention_mask = find(input_ids, self.get_decoder().config)
            return input_ids, attention_mask
        if labels.dim() != 2:
            raise ValueError(f"`labels` must have the shape [B, T] of a target, got {list(labels.shape)}")
        check_token_labels(labels, logits_to_keep, labels=labels)
        check_ids("labels", labels, self.get_decoder().config.vocab_size)  # shifted labels are decoder inputs
        start, config = self.config.decoder_start_token_id, self.get_decoder().config
        pad = start if config.pad_token_id is None else config.pad_token_id
        input_ids, kept = shift_right(labels, start, pad)
        tokens = find_mask(input_ids, config)
        if attention_mask is None and (tokens is None or start == pad):
            # `find_target_mask` would have to infer the start token, which is the first kept position here.
            attention_mask = kept if tokens is None else kept & (tokens | (kept.cumsum(dim=1) == 1))
        return input_ids, attention_mask
