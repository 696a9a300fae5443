"""The plan of a conversion and the target of an export, made before a tensor is touched."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.keymap import KeyMap


@dataclass
class Plan:
    """The class and configuration to write, the key map, and the messages for the user.

    `appended_symbol` is the symbol that fairseq adds to the dictionary after loading it (None: no symbol);
    `prepends_appended` says whether every sequence starts with it. `num_labels` is the number of classes that can have
    names (None: none). `also_loads` are classes that load from the same folder with all their weights. `languages` are
    source and target of an encoder-decoder; `generation` has the defaults of `generate`. `tokenizer` has the settings
    of the tokenizer in the checkpoint.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    keymap: KeyMap
    appended_symbol: str | None = None
    num_labels: int | None = None
    prepends_appended: bool = False
    languages: tuple[str, str] | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    also_loads: tuple[type[PreTrainedModel], ...] = ()
    tokenizer: dict[str, Any] = field(default_factory=dict)
    decisions: dict[str, str | int | float | bool | list[int] | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int | None:
        """Return the number of rows of the embedding, None for a model that reads real numbers."""
        return self.config.vocab_size if self.config.input_type == "tokens" else None


@dataclass(frozen=True)
class Target:
    """A model to export: class, configuration, the revision that will read it, its head (None: heads have no names)."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    revision: str
    head: str | None = None
