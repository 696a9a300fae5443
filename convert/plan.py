"""The plan of a conversion and the target of an export, made before a tensor is touched."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.dictionary import Dictionaries, assign_dictionaries, assign_pair, read_class_names
from luna_mega.convert.keymap import KeyMap


@dataclass
class Plan:
    """The class and configuration to write, the key map, and the messages for the user.

    `appended_symbol` is the symbol that fairseq adds to the dictionary after loading it (None: no symbol);
    `prepends_appended` says whether every sequence starts with it. `num_labels` is the number of classes that can have
    names (None: none). `also_loads` are classes that load from the same folder with all their weights. `languages` are
    source and target of an encoder-decoder; `named_classes` says that the file of labels has one name a line and no
    vocabulary; `generation` has the defaults of `generate`.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    keymap: KeyMap
    appended_symbol: str | None = None
    num_labels: int | None = None
    prepends_appended: bool = False
    languages: tuple[str, str] | None = None
    named_classes: bool = False
    generation: dict[str, Any] = field(default_factory=dict)
    also_loads: tuple[type[PreTrainedModel], ...] = ()
    decisions: dict[str, str | int | float | bool | list[int] | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int | None:
        """Return the number of rows of the embedding, None for a model that reads real numbers."""
        return self.config.vocab_size if self.config.input_type == "tokens" else None

    def find_dictionaries(self, given: list[str | Path], beside: Path) -> Dictionaries:
        """Find the dictionaries of the model among the files `given` or, when none is given, in the folder `beside`.

        Raises:
            ConversionError: a file does not fit the model, or one of two is missing.
        """
        if self.named_classes:
            return read_class_names(given, self.num_labels)
        if self.languages is None:
            return assign_dictionaries(given, beside, self.vocab_size, self.appended_symbol, self.num_labels)
        sizes = (self.vocab_size, self.config.get_text_config(decoder=True).vocab_size)
        return assign_pair(given, beside, self.languages, sizes, self.config.share_encoder_decoder_embeddings)


@dataclass(frozen=True)
class Target:
    """A model to export: class, configuration, the revision that will read it, its head (None: heads have no names)."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    revision: str
    head: str | None = None
