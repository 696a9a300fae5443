"""Base of the configurations of all families: checks of fields, and configurations of encoder and decoder."""

import copy
import dataclasses
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from huggingface_hub import dataclasses as hub_dataclasses
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Sub-folder of a model folder with the code of the model.
CODE_FOLDER = "luna_mega_code"
# Largest size of a tensor dimension: the kernels index with 32 bits.
MOST = 2**31 - 1
# Largest attention chunk: memory grows with the square of the chunk size.
MOST_IN_CHUNK = 2**20
MOST_LAYERS = 2**16
# Tokens that have one id in an encoder-decoder and in its two sides.
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
# The last commit with the fields in `removed_fields`.
LAST_COMMIT = "20c2b5c3"


# Names of BERT's configuration that no family has, see `SharedConfig.absent_fields`.
ABSENT_FIELDS: dict[str, tuple[Any, str]] = {
    "gradient_checkpointing": (False, "call `gradient_checkpointing_enable()` of the model"),
    "per_layer_config": (None, "omit it, because all layers have the same fields"),
    "tie_last_hidden_states": (None, "omit it"),
}


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
    """A layer type whose `repr` contains the fix, for the errors of other tools about context parallelism."""

    def __repr__(self) -> str:
        return f"{str(self)!r} (set cp_size and sp_size to 1)"

    def __contains__(self, part: object) -> bool:
        return part == "linear_attention"  # Accelerate searches for this name before sequence parallelism


class CodeCopy:
    """Copies the code of a loaded folder to folders that are saved without this package.

    The code of a folder contains a line that creates this object.

    Args:
        model_type: Type of the models that the code contains.
        auto_map: Their entries of `auto_map`: Auto class -> "file.Class".
    """

    def __init__(self, model_type: str, auto_map: dict[str, str]):
        self.model_type, self.auto_map = model_type, auto_map

    def __call__(self, config: PreTrainedConfig, folder: str | os.PathLike[str]) -> dict[str, str]:
        """Copy the code; return `auto_map`, or {} for a configuration of another type."""
        if config.model_type != self.model_type:
            return {}
        code = Path(folder, CODE_FOLDER)
        code.mkdir(parents=True, exist_ok=True)
        for file in Path(__file__).parent.glob("[!_]*.py"):
            shutil.copyfile(file, code / file.name)
        return dict(self.auto_map)


class SharedConfig(ConfigMixin):
    """Base of all configurations of this package.

    Attributes:
        default_fields: for each field that can be None, the field that applies then.
        decoder_fields: for each field of the decoder, the field of the encoder that it replaces unless it is None.
        seq2seq_class: class of the configuration of an encoder-decoder of the family, or None.
        side_class: class of the configurations of encoder and decoder; None unless the class has both.
        removed_fields: for each field that only earlier versions have: its value in the folders that are supported, and
            the end of the error for other values.
        absent_fields: for each name of BERT's configuration that the family does not have: the value with the same
            effect as no value, and the end of the error for other values.
        chunks_feed_forward: whether `chunk_size_feed_forward` has an effect.
        zero_fields: counts and sizes that may also be 0.
        input_fields: for each field that only some kinds of input use, their values of `input_type`. With other kinds
            the field must have its default, which saved configurations contain.
        stored_fields: fields whose value belongs to the weights, so that `update_from_string` does not derive it again.
    """

    # Links, not fields: `_sides` of an encoder-decoder, and `_whole`, the encoder-decoder to which a side belongs.
    __slots__ = ("_sides", "_whole")
    default_fields: dict[str, str] = {}
    decoder_fields: dict[str, str] = {}
    # TRL requires the attribute. Read-only, because all configurations share it.
    auto_map: Mapping[str, str] = MappingProxyType({})
    seq2seq_class: type["SharedConfig"] | None = None
    side_class: type["SharedConfig"] | None = None
    removed_fields: ClassVar[dict[str, tuple[Any, str]]] = {}
    absent_fields: ClassVar[dict[str, tuple[Any, str]]] = ABSENT_FIELDS
    chunks_feed_forward: ClassVar[bool] = False
    zero_fields: ClassVar[frozenset[str]] = frozenset()
    input_fields: ClassVar[dict[str, tuple[str, ...]]] = {}
    stored_fields: ClassVar[frozenset[str]] = frozenset()
    # Writes the code of the models to a folder, and returns the entries of `auto_map`.
    code_writer: ClassVar[Callable[["SharedConfig", str | os.PathLike[str]], dict[str, str]]]
    if TYPE_CHECKING:  # fields of every family
        hidden_size: int
        vocab_size: int
        num_hidden_layers: int
        input_type: str
        pad_token_id: int | None
        is_decoder: bool
        add_cross_attention: bool
        tie_word_embeddings: bool
        share_encoder_decoder_embeddings: bool | None
        decoder_vocab_size: int | None
        decoder_start_token_id: int | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # The constructor of a user's class may have arguments with names that `rename_fields` would change.
        has_constructor = "__init__" in vars(cls)
        super().__init_subclass__(**kwargs)
        if has_constructor or not issubclass(cls, PreTrainedConfig):
            return
        config_class: Any = cls
        initialize = config_class.__init__

        @functools.wraps(initialize)
        def initialize_by_name(self: Any, *args: Any, **fields: Any) -> None:
            initialize(self, *args, **type(self).rename_fields(fields))

        config_class.__init__ = initialize_by_name

    @classmethod
    def rename_fields(cls, fields: Mapping[str, Any], saved: bool = False) -> dict[str, Any]:
        """Return fields with the names of this family, without those in `absent_fields`.

        Args:
            fields: Names, also those in `attribute_map`, and their values.
            saved: The fields come from a folder: instead of raising an error, prefer the family's own name to others,
                ignore names that the family does not have, and warn.

        Raises:
            ValueError: a field has two values, or the family does not have it.
        """
        renamed: dict[str, tuple[str, Any]] = {}
        for key in sorted(fields, key=cls.attribute_map.__contains__):  # the family's own names first
            name, value = cls.attribute_map.get(key, key), fields[key]
            problem = advice = ""
            if name in cls.absent_fields:
                supported, advice = cls.absent_fields[name]
                problem = "" if value == supported else f"{cls.__name__} does not support `{name}`, got {value!r}"
            elif name not in renamed:
                renamed[name] = key, value
            elif value != renamed[name][1]:
                first, current = renamed[name]
                problem = f"`{first}` and `{key}` are the same field of {cls.__name__}, got {current!r} and {value!r}"
                advice = "pass only one of them"
            if problem and not saved:
                raise ConfigurationError(f"{problem}; {advice}")
            if problem:
                logger.warning_once(f"config.json: {problem}; `{key}` is ignored")
        return {name: value for name, (_, value) in renamed.items()}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Return a configuration from the fields of a folder and arguments, which override them.

        An argument that is None requests the default, as in the constructor.

        Raises:
            ValueError: an argument is invalid, see `rename_fields`.
        """
        fields, arguments = cls.rename_fields(config_dict, saved=True), cls.rename_fields(kwargs)
        optional = {item.name for item in dataclasses.fields(cls) if item.default is None}
        reset = [name for name, value in arguments.items() if value is None and name in optional]
        arguments = {name: value for name, value in arguments.items() if name not in reset}
        config: Self = super().from_dict(fields | dict.fromkeys(reset), **arguments)
        return config

    def __post_init__(self, **kwargs: Any) -> None:
        for name, (supported, advice) in self.removed_fields.items():
            if (value := kwargs.pop(name, supported)) != supported:
                raise ConfigurationError(
                    f"{name}={value!r} is not supported; the last commit of luna-mega that supports it is "
                    f"{LAST_COMMIT}{advice}"
                )
        for name, other in self.default_fields.items():
            if getattr(self, name) is None:
                setattr(self, name, getattr(self, other))
        # Only a warning, because transformers' tests of configurations set the field for all families.
        if self.chunk_size_feed_forward and not self.chunks_feed_forward:
            logger.warning_once(
                f"chunk_size_feed_forward={self.chunk_size_feed_forward} has no effect in {type(self).__name__}, whose "
                "feed-forward layers compute all positions at once; omit it"
            )
        kwargs.pop("model_type", None)  # differs between a user's subclass and the folders it reads
        auto_map = kwargs.pop("auto_map", None)
        if isinstance(auto_map, dict) and __package__ == "luna_mega.modeling_common":
            # Entries for own code are only read if the code of the folder is loaded instead of this package.
            auto_map = {name: code for name, code in auto_map.items() if is_foreign(code)}
        if auto_map:
            kwargs["auto_map"] = auto_map
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, also in the configurations of the encoder and the decoder of a model, see `sides`."""
        whole, sides = getattr(self, "_whole", None), self._linked()
        if whole is not None and name in TOKEN_IDS:
            setattr(whole, name, value)
        if not sides:
            super().__setattr__(name, value)
            return
        earlier = self.encoder_config, self.decoder_config
        super().__setattr__(name, value)
        for side, old, new in zip(sides, earlier, (self.encoder_config, self.decoder_config), strict=True):
            vars(side).update(item for item in vars(new).items() if item not in vars(old).items())

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing for a class of this package: `save_pretrained` saves its code in any case."""
        if not is_own(cls):
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, and the code of its models in the sub-folder `luna_mega_code`.

        Entries of `auto_map` that name code of other packages are saved if the folder contains that code. Use
        `luna_mega.save_code(False)` to omit the code of this package.
        """
        if push_to_hub:  # transformers would push only files at the top
            self.save_pretrained(save_directory)
            self.push_to_hub(kwargs.pop("repo_id", None) or Path(save_directory).name, **kwargs)
            return
        old_map = vars(self).pop("auto_map", None)
        foreign_map = {
            name: code for name, code in (old_map or {}).items() if is_foreign(code) and has_code(code, save_directory)
        }
        write_code = type(self).code_writer
        code = write_code(self, save_directory)
        # Trainer pushes the folder of the run, to which it copies only configuration and weights of a checkpoint.
        if re.fullmatch(r"checkpoint-\d+", Path(save_directory).name):
            write_code(self, Path(save_directory).parent)
        if code or foreign_map or self._auto_class:  # transformers adds the code of a user's class
            self.auto_map = code | foreign_map
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            vars(self).pop("auto_map", None)
            if old_map is not None:
                self.auto_map = old_map

    def update_from_string(self, update_str: str) -> None:
        """Update fields from `"name=value,name=value"`.

        A field that has the value derived from other fields, such as `num_pack_attention_heads`, is derived again
        unless the string contains it or it belongs to the weights (`stored_fields`).

        Raises:
            ValueError: the string contains an unknown field, or the resulting fields do not fit together.
        """
        names = {part.partition("=")[0] for part in update_str.split(",")}
        names = {self.attribute_map.get(name, name) for name in names} | self.stored_fields
        optional = [item.name for item in dataclasses.fields(self) if item.default is None and item.name not in names]
        rebuilt = {name: type(self).from_dict(self.to_dict() | {name: None}) for name in optional}
        derived = [name for name in optional if getattr(rebuilt[name], name) == getattr(self, name)]
        super().update_from_string(update_str)
        for name, value in vars(type(self).from_dict(self.to_dict() | dict.fromkeys(derived))).items():
            setattr(self, name, value)

    @classmethod
    def with_encoder(cls) -> Any:
        """Return the class of the configurations of this family's encoder-decoders."""
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
        if not (model_type := fields.get("model_type")) or model_type in supported:
            return fields, others
        if model_type == side and fields.get("is_encoder_decoder"):
            raise ValueError(f"{pretrained_model_name_or_path}: {cls._wrong_side_message()}")
        architectures = ", ".join(fields.get("architectures") or ["none"])
        raise ValueError(
            f"{pretrained_model_name_or_path} has `model_type` {model_type!r}, but {cls.__name__} requires "
            f"{cls.model_type!r}; load it with an Auto class or the class in its config.json ({architectures})"
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
        # The cache that `EncoderDecoderModel.generate` creates for "linear_attention" has no length, see `fill_cache`.
        kind = "hybrid" if self.add_cross_attention else "linear_attention"
        return [_RecurrentLayer(kind)] * self.num_hidden_layers

    @property
    def shares_embeddings(self) -> bool:
        """Whether source and target share an embedding matrix."""
        if self.share_encoder_decoder_embeddings is not None:
            return self.share_encoder_decoder_embeddings
        return self.tie_word_embeddings and self.decoder_vocab_size in (None, self.vocab_size)

    @property
    def sides(self) -> tuple[Self, Self]:
        """The configurations of the encoder and the decoder of models, to which changes of this one are copied.

        Changes of `TOKEN_IDS` in a side are copied to this one.
        """
        if not self._linked():
            sides: Any = self.encoder_config, self.decoder_config
            for side in sides:
                side._whole = self
            self._sides = sides
        return self._sides  # type: ignore[no-any-return]

    def _linked(self) -> tuple[Any, ...]:
        """Return `sides` if they exist and are linked to this object, else `()`, as for a shallow copy."""
        sides: tuple[Any, ...] = getattr(self, "_sides", ())
        return sides if sides and sides[0]._whole is self else ()

    @property
    def encoder_config(self) -> Self:
        """The configuration of the encoder of an encoder-decoder."""
        config: Any = object.__new__(self.side_class or type(self))
        vars(config).update(copy.deepcopy(vars(self)))  # without the links
        config.is_encoder_decoder = config.is_decoder = config.add_cross_attention = False
        vars(config).pop("auto_map", None)  # names the code of the encoder-decoder
        return config  # type: ignore[no-any-return]

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
        """Return the configuration of the encoder or of the decoder; of the entire model unless one is selected.

        The configuration of the entire model gets the `vocab_size` of the target, which `generate` and
        `compute_transition_scores` read.
        """
        if self.is_encoder_decoder and decoder != encoder:
            return self.decoder_config if decoder else self.encoder_config
        if not self.is_encoder_decoder or self.decoder_vocab_size in (None, self.vocab_size):
            return self
        config: Any = copy.deepcopy(self)
        config.vocab_size = self.decoder_vocab_size
        config._whole = self  # Trainer sets token ids of the configuration that this returns
        return config  # type: ignore[no-any-return]

    def _check_choices(self, choices: Mapping[str, tuple[str | None, ...]]) -> None:
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(map(str, allowed))}, got {getattr(self, field)!r}")

    def _check_activations(self, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) not in ACT2FN:
                raise ValueError(f"{field} must be an activation of transformers' ACT2FN, got {getattr(self, field)!r}")

    @property
    def longest_input(self) -> int | None:
        """The greatest number of positions of a text; None = no limit."""
        return None

    def _check_counts(self, fields: Iterable[str], least: int = 1, most: int = MOST) -> None:
        """Raise `ValueError` for integers below `least` or above `most`; ignore values of other types, such as None.

        `zero_fields` may be 0.
        """
        for field in fields:
            value, lowest = getattr(self, field), 0 if field in self.zero_fields else least
            if isinstance(value, int) and not isinstance(value, bool) and not lowest <= value <= most:
                limit = f"at least {lowest}" if value < lowest else f"at most {most}"
                raise ValueError(f"{field} must be {limit}, got {value}")

    def _check_probabilities(self, *fields: str) -> None:
        for field in fields:
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field} must be in [0, 1), got {getattr(self, field)}")

    def _check_input_fields(self) -> None:
        """Raise `ValueError` for fields of another `input_type` that differ from their defaults."""
        defaults = {item.name: item.default for item in dataclasses.fields(type(self))}
        for field, kinds in self.input_fields.items():
            if self.input_type not in kinds and (value := getattr(self, field)) != defaults[field]:
                supported = " or ".join(map(repr, kinds))
                raise ValueError(f"{field}={value!r} requires input_type={supported}, got {self.input_type!r}; omit it")

    def _check_deviations(self, *fields: str) -> None:
        for field in fields:
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} must be a number of at least 0, got {getattr(self, field)}")

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


def is_own(cls: type) -> bool:
    """Return whether a class is part of this package, or of the same code of a folder."""
    return cls.__module__.startswith(f"{__package__.removesuffix('.modeling_common')}.")


def is_foreign(code: Any) -> bool:
    """Return whether an entry of `auto_map` (one class, or a slow and a fast one) names code of another package."""
    # Earlier versions saved `auto_luna.py` and others next to the weights.
    return not any(
        re.match(rf"{CODE_FOLDER}/|auto_(luna|mega|megalodon)(_seq2seq)?\.", str(part)) for part in _parts(code)
    )


def has_code(code: Any, folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder contains the files of an entry of `auto_map`, or the entry names another repository."""
    return all(
        isinstance(part, str) and ("--" in part or os.path.isfile(Path(folder, f"{part.partition('.')[0]}.py")))
        for part in _parts(code)
    )


def _parts(code: Any) -> list[Any]:
    return [part for part in (code if isinstance(code, list | tuple) else [code]) if part is not None]
