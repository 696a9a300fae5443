"""What a conversion is going to do, before a tensor is touched."""

from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.keymap import KeyMap
from luna_mega.errors import ConversionError


@dataclass
class Plan:
    """The class and configuration to write, the key map, and what to tell the user.

    `appended_symbol` is what fairseq adds to the dictionary after loading it (None: nothing), `prepends_appended`
    whether every sequence starts with it, `num_labels` the number of classes that can have names (None: none);
    `also_loads` are classes that load from the same folder with all their weights; `languages` are those of source and
    target of an encoder-decoder, `generation` what `generate` does by default.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    keymap: KeyMap
    appended_symbol: str | None
    num_labels: int | None
    prepends_appended: bool = False
    languages: tuple[str, str] | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    also_loads: tuple[type[PreTrainedModel], ...] = ()
    decisions: dict[str, str | int | float | bool | list[int] | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None: the model reads real numbers."""
        return self.config.vocab_size if self.config.input_type == "tokens" else None

    @property
    def target_vocab_size(self) -> int:
        """Rows of the embedding of an encoder-decoder's target."""
        return self.config.get_text_config(decoder=True).vocab_size


def build_config(config_class: type[PreTrainedConfig], **fields) -> PreTrainedConfig:
    """A configuration; args and shapes that do not fit together end in a `ConversionError`."""
    try:
        return config_class(**fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"args and tensors do not fit together: {error}") from error
