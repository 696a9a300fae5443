"""Base of the configurations of all families: checks of fields, and configurations of encoder and decoder."""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from huggingface_hub import dataclasses as hub_dataclasses
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

# Largest size of a tensor dimension: the kernels index with 32 bits.
MOST = 2**31 - 1
# Largest attention chunk: memory grows with the square of the chunk size.
MOST_IN_CHUNK = 2**20
MOST_LAYERS = 2**16


# At runtime the family's configuration class lists `PreTrainedConfig` after the mixins.
if TYPE_CHECKING:
    ConfigMixin = PreTrainedConfig
else:
    ConfigMixin = object


ConfigClass = TypeVar("ConfigClass", bound=type)


class ConfigurationError(StrictDataclassError, ValueError):
    """Fields of a configuration that are invalid or do not fit together."""


def strict(config_class: ConfigClass) -> ConfigClass:
    """Check fields with `strict` of huggingface_hub, whose errors would name the method of the check first."""
    decorated: Any = hub_dataclasses.strict(config_class)
    validate = decorated.validate

    def validate_plainly(self: Any) -> None:
        try:
            validate(self)
        except StrictDataclassClassValidationError as error:
            raise ConfigurationError(str(error.__cause__)) from error.__cause__

    validate_plainly.__is_defined_by_strict_decorator__ = True  # type: ignore[attr-defined]  # subclasses replace it
    decorated.validate = validate_plainly
    return decorated


class _RecurrentLayer(str):
    """A layer type for which context parallelism of other tools raises an error; its `repr` says what to set."""

    def __repr__(self) -> str:
        return f"{str(self)!r} (set cp_size and sp_size to 1)"


class _NoCode(dict[str, str]):
    """An `auto_map` that rejects code for configuration classes of the installed package."""

    def __setitem__(self, name: str, code: str) -> None:
        raise ValueError(
            f"`register_for_auto_class({name!r})` of transformers would save one of many files; call "
            "`luna_mega.hub.bundle.register_for_auto_class(model)` instead, or add the code to the saved folder with "
            "`luna-mega bundle`"
        )


class SharedConfig(ConfigMixin):
    """Base of all configurations of this package.

    Attributes:
        default_fields: for each field that can be None, the field that applies then.
        decoder_fields: for each field of the decoder, the field of the encoder that it replaces unless it is None.
        seq2seq_class: class of the configuration of an encoder-decoder of the family, or None.
        side_class: class of the configurations of encoder and decoder; None unless the class has both.
    """

    default_fields: dict[str, str] = {}
    decoder_fields: dict[str, str] = {}
    auto_map: dict[str, str] = _NoCode()  # TRL requires the attribute
    seq2seq_class: type["SharedConfig"] | None = None
    side_class: type["SharedConfig"] | None = None
    # Adds the code of the model to a saved folder; set by `luna_mega.hub.bundle.register_for_auto_class`.
    code_writer: Callable[[str | os.PathLike[str]], None] | None = None
    if TYPE_CHECKING:  # fields of every family
        hidden_size: int
        vocab_size: int
        num_hidden_layers: int
        input_type: str
        pad_token_id: int | None
        is_decoder: bool
        tie_word_embeddings: bool
        share_encoder_decoder_embeddings: bool | None
        decoder_vocab_size: int | None
        decoder_start_token_id: int | None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, other in self.default_fields.items():
            if getattr(self, name) is None:
                setattr(self, name, getattr(self, other))
        kwargs.pop("model_type", None)  # differs between a user's subclass and the folders it reads
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, and the code of its models if a model is registered for its Auto class.

        Raises:
            ValueError: `push_to_hub` is set for a configuration with code, which would upload only its JSON file.
        """
        if push_to_hub and self.code_writer is not None:
            raise ValueError(
                "`push_to_hub=True` uploads a configuration without its code; use `config.push_to_hub(...)` instead"
            )
        loaded = vars(self).pop("auto_map", None)  # refers to the folder that a bundle was loaded from
        if present := {
            name: code for name, code in (loaded or {}).items() if _has_code(code, type(self), save_directory)
        }:
            self.auto_map = present
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        if loaded is not None:
            self.auto_map = loaded
        if self.code_writer is not None:
            self.code_writer(save_directory)

    def update_from_string(self, update_str: str) -> None:
        """Update fields from `"name=value,name=value"`.

        A field that has the value derived from other fields, such as `num_pack_attention_heads`, is derived again
        unless the string contains it.

        Raises:
            ValueError: the string contains an unknown field, or the resulting fields do not fit together.
        """
        given = {part.partition("=")[0] for part in update_str.split(",")}
        given = {self.attribute_map.get(name, name) for name in given}
        unset = [item.name for item in dataclasses.fields(self) if item.default is None and item.name not in given]
        rebuilt = {name: type(self).from_dict(self.to_dict() | {name: None}) for name in unset}
        derived = [name for name in unset if getattr(rebuilt[name], name) == getattr(self, name)]
        super().update_from_string(update_str)
        vars(self).update(vars(type(self).from_dict(self.to_dict() | dict.fromkeys(derived))))

    @classmethod
    def with_encoder(cls) -> Any:
        """Return the class of the configuration of an encoder-decoder, which is this class if it has two sides."""
        return cls.seq2seq_class if cls.side_class is None else cls

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json of a folder or repository.

        Raises:
            ValueError: the model has another type. Most of its weights would not be loaded.
        """
        fields, others = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        side = getattr(cls.side_class, "model_type", None)
        supported = {getattr(kind, "model_type", None) for kind in cls.__mro__} - {side}
        if not (given := fields.get("model_type")) or given in supported:
            return fields, others
        if given == side and fields.get("is_encoder_decoder"):
            raise ValueError(f"{pretrained_model_name_or_path}: {cls._wrong_side_message()}")
        named = ", ".join(fields.get("architectures") or ["none"])
        raise ValueError(
            f"{pretrained_model_name_or_path} has `model_type` {given!r}, but {cls.__name__} requires "
            f"{cls.model_type!r}; load it with an Auto class or the class in its config.json ({named})"
        )

    @classmethod
    def _wrong_side_message(cls) -> str:
        new = cls.with_encoder()
        return (
            f"`is_encoder_decoder=True` requires {new.__name__}, not {new.side_class.__name__}; in a config.json, set "
            f'"model_type": "{new.model_type}"'
        )

    @property
    def layer_types(self) -> list[str]:
        """Types of the layers, all recurrent. Accelerate checks them before context parallelism."""
        self._check_counts(["num_hidden_layers"], most=MOST_LAYERS)  # transformers reads this before validation
        return [_RecurrentLayer("linear_attention")] * self.num_hidden_layers

    @property
    def shares_embeddings(self) -> bool:
        """Whether source and target share an embedding matrix."""
        if self.share_encoder_decoder_embeddings is not None:
            return self.share_encoder_decoder_embeddings
        return self.tie_word_embeddings and self.decoder_vocab_size in (None, self.vocab_size)

    @property
    def encoder_config(self) -> Self:
        """The configuration of the encoder of an encoder-decoder."""
        config = copy.deepcopy(self)
        config.__class__ = self.side_class or type(self)  # type: ignore[assignment]
        config.is_encoder_decoder = config.is_decoder = config.add_cross_attention = False
        vars(config).pop("auto_map", None)  # a bundle contains the code of the encoder-decoder
        return config

    @property
    def decoder_config(self) -> Self:
        """The configuration of the decoder of an encoder-decoder."""
        config = self.encoder_config
        config.is_decoder = config.add_cross_attention = True
        for own, field in self.decoder_fields.items():
            if getattr(self, own) is not None:
                setattr(config, field, getattr(self, own))
        return config

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Self:
        """Return the configuration of the encoder or the decoder, or unless one is selected the entire configuration.

        The entire configuration has the `vocab_size` of the target, which `generate` and `compute_transition_scores`
        read.
        """
        if self.is_encoder_decoder and decoder != encoder:
            return self.decoder_config if decoder else self.encoder_config
        if not self.is_encoder_decoder or self.decoder_vocab_size in (None, self.vocab_size):
            return self
        config = copy.deepcopy(self)
        config.vocab_size = self.decoder_vocab_size
        return config

    def _check_choices(self, choices: dict[str, tuple[str | None, ...]]) -> None:
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(map(str, allowed))}, got {getattr(self, field)!r}")

    def _check_activations(self, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) not in ACT2FN:
                raise ValueError(f"{field} must be an activation of transformers' ACT2FN, got {getattr(self, field)!r}")

    def _check_counts(self, fields: Iterable[str], least: int = 1, most: int = MOST) -> None:
        """Raise `ValueError` for integers below `least` or above `most`; ignore values of other types, such as None."""
        for field in fields:
            value = getattr(self, field)
            if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
                limit = f"at least {least}" if value < least else f"at most {most}"
                raise ValueError(f"{field} must be {limit}, got {value}")

    def _check_probabilities(self, *fields: str) -> None:
        for field in fields:
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field} must be in [0, 1), got {getattr(self, field)}")

    def _check_deviations(self, *fields: str) -> None:
        for field in fields:
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} must be a number of at least 0, got {getattr(self, field)}")

    def _check_padding(self, needed: bool = True) -> None:
        """Raise `ValueError` if `pad_token_id` is outside the vocabulary, or if it is `needed` but None."""
        if self.input_type != "tokens" or self.pad_token_id is None and not needed:
            return
        if self.pad_token_id is None or not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id must be a token of the vocabulary (0 to {self.vocab_size - 1}), got {self.pad_token_id}"
            )

    def _check_sides(self) -> None:
        """Raise `ValueError` for invalid combinations of the fields of decoders and encoder-decoders."""
        if self.add_cross_attention and not self.is_decoder:
            raise ValueError("add_cross_attention=True requires is_decoder=True")
        if self.side_class is not None and not self.is_encoder_decoder:
            raise ValueError(
                f"{type(self).__name__} configures an encoder-decoder, got `is_encoder_decoder=False`; use "
                f"{self.side_class.__name__}"
            )
        if not self.is_encoder_decoder:
            return
        if self.side_class is None:
            raise ValueError(self._wrong_side_message())
        if self.is_decoder:
            raise ValueError("an encoder-decoder has no is_decoder=True; omit is_decoder and add_cross_attention")
        self._check_counts(self.decoder_fields)
        vocabulary = self.decoder_config.vocab_size
        if self.shares_embeddings and not (self.tie_word_embeddings and vocabulary == self.vocab_size):
            raise ValueError(
                "share_encoder_decoder_embeddings=True requires tie_word_embeddings=True and equal vocabularies, got "
                f"tie_word_embeddings={self.tie_word_embeddings}, vocab_size={self.vocab_size} and "
                f"decoder_vocab_size={vocabulary}"
            )
        start = self.decoder_start_token_id
        if start is None or not 0 <= start < vocabulary:
            raise ValueError(
                f"decoder_start_token_id must be a token of the target vocabulary (0 to {vocabulary - 1}), got {start}"
            )
        if start == self.pad_token_id:
            raise ValueError(
                f"decoder_start_token_id and pad_token_id are both {start}, and the mask drops padding; use another "
                "decoder_start_token_id"
            )


def _has_code(code: Any, config_class: type, folder: str | os.PathLike[str]) -> bool:
    """Return whether the files of an `auto_map` entry (one class, or a slow and a fast one) are in the folder."""
    if not config_class.__module__.startswith("luna_mega."):  # transformers saves the code of a bundle's own classes
        return True
    names = [name for name in (code if isinstance(code, list | tuple) else [code]) if name]
    return all(os.path.isfile(os.path.join(folder, f"{str(name).partition('.')[0]}.py")) for name in names)
