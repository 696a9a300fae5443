# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The shared part of both configurations: checks of fields, and the two sides of an encoder-decoder."""

import copy
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from transformers.activations import ACT2FN


class _RecurrentLayer(str):
    """The type of a layer that the context parallelism of other tools has to refuse, printed with the way out."""

    def __repr__(self) -> str:
        return f"{str(self)!r} (leave cp_size and sp_size at 1, and pass cp_group to the model's forward)"


class SharedConfig:
    """A part of `LunaConfig` and `MegaConfig`.

    `decoder_fields` names the decoder's own fields and the encoder's field that each one replaces where it is not None.
    """

    decoder_fields = {}
    auto_map = MappingProxyType({})  # TRL reads it of every configuration

    @property
    def layer_types(self) -> list[str]:
        """The type of every layer: all carry states along the sequence, by which accelerate tells what it can split."""
        return [_RecurrentLayer("linear_attention")] * self.num_hidden_layers

    @property
    def shares_embeddings(self) -> bool:
        """Tell whether source and target have one embedding."""
        if self.share_encoder_decoder_embeddings is not None:
            return self.share_encoder_decoder_embeddings
        return self.tie_word_embeddings and self.decoder_vocab_size in (None, self.vocab_size)

    @property
    def encoder_config(self):
        """The configuration of the encoder of an encoder-decoder."""
        config = copy.deepcopy(self)
        config.is_encoder_decoder = False
        return config

    @property
    def decoder_config(self):
        """The configuration of the decoder of an encoder-decoder."""
        config = self.encoder_config
        config.is_decoder = config.add_cross_attention = True
        for own, field in self.decoder_fields.items():
            if getattr(self, own) is not None:
                setattr(config, field, getattr(self, own))
        return config

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None):
        """Return the configuration of the side of an encoder-decoder that is asked for, else the whole.

        The whole has the `vocab_size` of the target: `generate` and `compute_transition_scores` count by it.
        """
        if self.is_encoder_decoder and decoder != encoder:
            return self.decoder_config if decoder else self.encoder_config
        if not self.is_encoder_decoder or self.decoder_vocab_size in (None, self.vocab_size):
            return self
        config = copy.deepcopy(self)
        config.vocab_size = self.decoder_vocab_size
        return config

    def _check_choices(self, choices: dict[str, tuple[str, ...]]):
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {getattr(self, field)!r}")

    def _check_activations(self, *fields: str):
        for field in fields:
            if getattr(self, field) not in ACT2FN:
                raise ValueError(f"{field} is {getattr(self, field)!r}, which transformers' ACT2FN does not have")

    def _check_counts(self, fields: Iterable[str], least: int = 1):
        """Refuse whole numbers below `least`; a field may be None or of another type."""
        for field in fields:
            if _is_number(value := getattr(self, field)) and value < least:
                raise ValueError(f"{field} must be at least {least}, got {value}")

    def _check_probabilities(self, *fields: str):
        for field in fields:
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field} must be in [0, 1), got {getattr(self, field)}")

    def _check_deviations(self, *fields: str):
        for field in fields:
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} must be a number of at least 0, got {getattr(self, field)}")

    def _check_padding(self):
        if self.input_type == "tokens" and (self.pad_token_id is None or not 0 <= self.pad_token_id < self.vocab_size):
            raise ValueError(
                f"pad_token_id ({self.pad_token_id}) must be a token of the vocabulary (0 to {self.vocab_size - 1}): "
                "it marks padding"
            )

    def _check_sides(self):
        """Refuse fields of a decoder, or of an encoder-decoder, that do not fit together."""
        if self.add_cross_attention and not self.is_decoder:
            raise ValueError("add_cross_attention=True needs is_decoder=True")
        if not self.is_encoder_decoder:
            return
        if self.is_decoder:
            raise ValueError("is_encoder_decoder=True has a decoder: leave is_decoder and add_cross_attention out")
        self._check_counts(self.decoder_fields)
        vocabulary = self.decoder_config.vocab_size
        if self.shares_embeddings and not (self.tie_word_embeddings and vocabulary == self.vocab_size):
            raise ValueError(
                "share_encoder_decoder_embeddings=True needs tie_word_embeddings=True and equal vocabularies, got "
                f"tie_word_embeddings={self.tie_word_embeddings}, vocab_size={self.vocab_size} and "
                f"decoder_vocab_size={vocabulary}"
            )
        start = self.decoder_start_token_id
        if start is None or not 0 <= start < vocabulary:
            raise ValueError(
                f"decoder_start_token_id ({start}) must be a token of the target vocabulary (0 to {vocabulary - 1})"
            )
        if start == self.pad_token_id:
            raise ValueError(
                f"decoder_start_token_id and pad_token_id are both {start}: padding is masked, so a target would have "
                "no first token"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
