"""The interface of a checkpoint format: all that importer, exporter and `luna-mega info` know of one.

A new format is a subclass of `Format` in a file of its own, an instance of it in `registry.py` (or passed to
`register_format`), and tests. A method that is not overridden suits most formats.
"""

import argparse
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.argmap import Table, defaults, typed_args, write_args
from luna_mega.convert.dictionary import Dictionaries
from luna_mega.convert.dictionary_kinds import DictionaryKind, LanguagePair, VocabularyAndLabels
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.keymap import KeyMap
from luna_mega.convert.layer_norm import LayerNormDecision, decide_layer_norm
from luna_mega.convert.plan import Plan, Target
from luna_mega.convert.safe_load.reader import Checkpoint
from luna_mega.convert.tokenizers import ConvertedTokenizer

Tensors = dict[str, torch.Tensor]
Files = dict[str, bytes | Tensors]

# Fields for initialisation, generation and execution: a checkpoint says nothing about them.
_NOT_IN_A_FILE = {
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "sparse_prediction",
    "unpad_inputs",
    "use_cache",
}
_OF_CLASSIFIERS = {
    "pooling",
    "pool_padding",
    "drop_first_token",
    "classifier_num_layers",
    "classifier_hidden_size",
    "classifier_activation",
    "classifier_dropout",
    "classifier_bias",
    "pair_features",
    "num_labels",
}


@dataclass(frozen=True)
class Revision:
    """Words for one revision of the original code: the format as it was then, the revision, the code as a whole."""

    format: str
    name: str
    code: str


def problem_type(config: PreTrainedConfig) -> str:
    """Return `config.problem_type`; where it is not set, the one that transformers takes."""
    return config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")


def language_pair(plan: Plan) -> LanguagePair:
    """Return the dictionaries of an encoder-decoder, whose plan names the languages."""
    sizes = (plan.vocab_size, plan.config.get_text_config(decoder=True).vocab_size)
    return LanguagePair(plan.languages, sizes, plan.config.share_encoder_decoder_embeddings)


class Format(ABC):
    """The rules of one kind of checkpoint.

    Attributes:
        name: its name in reports; no two formats have the same.
        revisions: name -> words, for every revision of the original code that a file can be told to come from.
        written: the revisions to try, in order, when a model that was not converted is exported.
        config_class: the configuration of its models.
        classes: the model classes that such a file can be.
        classifiers: the classes among these that end in a classification head.
        named_heads: True if a file can have several classification heads, and the user chooses one by its name.
        way_out: advice for a model whose head no format has; None = the error lists the classes instead.
        refused: option (layer-norm, ema-convention) -> why a file of this format does not take it.
        training_fields: fields of the configuration that matter in training only; a difference is a warning.
        table: the arguments, in the order in which they are written; see argmap.py.
        architectures: name of an architecture -> its own defaults of arguments, which win over the table.
        criteria: name of a criterion -> its class, unless that is CrossEntropyCriterion.
        vocabulary_places, label_places: task -> place of the dictionary, unless that is the usual place.
        also_loads: classes that load from a folder of every other class.
        needs_args: False if a file without args can be converted, as its tensors tell everything.
        software: the code that saves such checkpoints.
        settings: the place of the args in a checkpoint, for messages.
        refuses_non_finite: True if NaN or Inf among the weights is an error; else it is a warning.
        is_folder: True if a checkpoint is a folder with several files, whose tensors may be split into shards.
    """

    name: str
    revisions: dict[str, Revision]
    written: tuple[str, ...]
    config_class: type[PreTrainedConfig]
    classes: tuple[type[PreTrainedModel], ...]
    classifiers: tuple[type[PreTrainedModel], ...] = ()
    named_heads: bool = False
    way_out: str | None = None
    refused: dict[str, str] = {}
    training_fields: tuple[str, ...] = ()
    table: Table = ()
    architectures: dict[str, dict[str, Any]] = {}
    criteria: dict[str, str] = {}
    vocabulary_places: dict[str, str] = {}
    label_places: dict[str, str] = {}
    also_loads: tuple[type[PreTrainedModel], ...] = ()
    needs_args: bool = True
    software: str = "fairseq"
    settings: str = "args"
    refuses_non_finite: bool = False
    is_folder: bool = False

    # From a file to a model.

    def has_folder(self, folder: Path) -> bool:
        """Return whether a folder holds a checkpoint of this format, be it whole or damaged."""
        return False

    def read_folder(self, folder: Path, progress: bool) -> Checkpoint:
        """Return the checkpoint in a folder for which `has_folder` is true, its shards joined.

        Raises:
            ConversionError: a file is missing or damaged, or the files do not belong together.
        """
        raise NotImplementedError(f"format {self.name!r} has folders, so that it overrides Format.read_folder")

    @abstractmethod
    def recognise(self, tensors: Tensors, args: dict[str, Any]) -> str | None:
        """Return the revision of the code that wrote the file; None when it is not of this format."""

    def refusal(self, tensors: Tensors, arch: str) -> str | None:
        """Return why a file that no format recognises is refused, if it resembles this format; else None."""
        return None

    def canonical(self, tensors: Tensors) -> tuple[Tensors, list[str]]:
        """Return the tensors, in order, under the names of the key map, and notes on renamed ones."""
        return tensors, []

    def decide_revision(self, revision: str, tensors: Tensors, ema_convention: str) -> tuple[str, str | None]:
        """Return the revision to convert, and a warning where an option contradicts the file.

        Raises:
            ConversionError: the file does not tell its revision; an option has to.
        """
        return revision, None

    def decide_norms(self, weights: list[torch.Tensor], layer_norm: str) -> LayerNormDecision | None:
        """Return how the norm weights of a file are stored; None: as they are.

        Args:
            weights: the tensors that the key map marks with `LAYER_NORM`.
            layer_norm: the option; "auto" = the file tells.

        Raises:
            ConversionError: the file does not tell; an option has to.
        """
        return decide_layer_norm(weights, layer_norm) if weights else None

    def assumed(self, revision: str) -> str:
        """Return the revision that describes a file whose own revision is unknown."""
        return revision

    def stored_dtype(self, tensors: Tensors) -> str:
        """Return the dtype of a converted folder where the option does not say it."""
        return "float32"

    def architecture(self, args: dict[str, Any]) -> str:
        """Return the name of the architecture in the args."""
        return str(args.get("arch"))

    def evidence(self, tensors: Tensors, args: dict[str, Any], revision: str) -> Evidence:
        """Return tensors and args with the defaults of the architecture, for `plan` to read.

        Raises:
            ConversionError: an argument has another type than its row of the table says.
        """
        own = self.architectures.get(self.architecture(args), {})
        typed = typed_args(self.table, args, revision, self.settings)
        return Evidence(tensors, typed, revision, defaults(self.table) | own, self.settings)

    @abstractmethod
    def plan(self, evidence: Evidence, head: str | None = None) -> Plan:
        """Return the plan: the class, configuration and key map that the file becomes.

        Args:
            evidence: the result of `evidence`.
            head: name of the classification head to convert; None = the format decides.

        Raises:
            ConversionError: args and tensors contradict each other, or the file has no head `head`.
        """

    def dictionaries(self, plan: Plan, task: str | None) -> DictionaryKind:
        """Return the kind of dictionaries of a model, which was trained on a `task` of the original."""
        usual = VocabularyAndLabels
        return VocabularyAndLabels(
            plan.vocab_size,
            plan.appended_symbol,
            plan.num_labels,
            vocabulary_place=self.vocabulary_places.get(task, usual.vocabulary_place),
            label_place=self.label_places.get(task, usual.label_place),
            labelled=plan.config.problem_type != "regression",
        )

    @abstractmethod
    def tokenizer(self, plan: Plan, dictionaries: Dictionaries, bpe: str | Path | None) -> ConvertedTokenizer | None:
        """Return the tokenizer, or None where a file that it needs is not given.

        Args:
            plan: gets a note when an option would add a tokenizer, or when transformers alone does not load it.
            dictionaries: the dictionaries, which fit the model; the vocabulary may be None.
            bpe: the option `--bpe`.

        Raises:
            ConversionError: `bpe` does not suit the checkpoint or the dictionary, or its files are at fault.
        """

    def preprocessor(self, config: PreTrainedConfig) -> dict[str, Any] | None:
        """Return the content of preprocessor_config.json, or None for a model that needs no such file."""
        return None

    def heads(self, plan: Plan, tensors: Tensors) -> list[str]:
        """Return a line about each head of a file, for `luna-mega info`."""
        name = plan.model_class.__name__.rpartition("For")[2]
        return [f"{name}: {plan.config.num_labels} classes, pooling {plan.config.pooling}"]

    # From a model to a file.

    @abstractmethod
    def keymap(self, config: PreTrainedConfig, revision: str, head: str | None = None) -> KeyMap:
        """Return the names of the tensors of such a model; `head`: the name of its classification head."""

    @abstractmethod
    def allowed(self, target: Target) -> dict[str, tuple]:
        """Return field -> the values that the original can express; a field that is absent may have any value."""

    def resolved(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration with a value in every field that is None where it follows another field."""
        return config

    def unused(self, target: Target) -> set[str]:
        """Return the fields that a checkpoint of the model does not determine, so that they may differ."""
        config, unused = target.config, set(_NOT_IN_A_FILE)
        if config.input_type != "tokens":
            unused |= {"vocab_size", "pad_token_id"}
        if target.model_class not in self.classifiers:
            unused |= _OF_CLASSIFIERS
        if not target.model_class.__name__.endswith("PairClassification"):
            unused.add("pair_features")
        if not target.model_class.__name__.endswith("ForSequenceClassification"):
            unused.add("problem_type")
        if config.classifier_num_layers == 0:
            unused |= {"classifier_hidden_size", "classifier_activation"}
        return unused

    def usual_head(self, config: PreTrainedConfig) -> str | None:
        """Return the original's name for a classification head like the model's; None: heads have no names."""
        return None

    def norm_convention(self, revision: str) -> str | None:
        """Return how the revision stores norm weights, "standard" or "plus-one"; None: there is one way only.

        An export asks for it where neither an option nor a converted file decides.
        """
        return None

    def args(self, target: Target) -> dict[str, Any]:
        """Return the args of a checkpoint for a model that the original can express, see `allowed`."""
        resolved = Target(target.model_class, self.resolved(target.config), target.revision, target.head)
        return write_args(self.table, resolved)

    def remarks(self, target: Target, args: dict[str, Any], left_out: list[str]) -> list[str]:
        """Return notes on an exported file; `left_out` has the names of tensors that the conversion dropped."""
        return []

    def state(self, args: dict[str, Any], tensors: Tensors, num_updates: int) -> dict[str, Any]:
        """Return the content of a file as the original saves it, at the start of an epoch, without optimizer state.

        It has the form that `checkpoint_utils.save_state` of fairseq writes.
        """
        history = {
            "criterion_name": self.criteria.get(args.get("criterion"), "CrossEntropyCriterion"),
            "optimizer_name": "FairseqAdam",
            "lr_scheduler_state": {"best": None},
            "num_updates": num_updates,
        }
        iterator = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
        return {
            "args": argparse.Namespace(**args),
            "model": tensors,
            "optimizer_history": [history],
            "extra_state": {"train_iterator": iterator, "val_loss": None},
        }

    def files(self, target: Target, args: dict[str, Any], tensors: Tensors, beside: Files, shards: int | None) -> Files:
        """Return the files of a folder: name -> bytes, or -> tensors for `torch.save`.

        Args:
            target: the model.
            args: the args of the checkpoint.
            tensors: the tensors of the whole model.
            beside: the dictionaries, which are written too.
            shards: number of files that share the tensors; None = as in the converted folder, else one.

        Raises:
            ConversionError: the tensors cannot be split so.
        """
        raise NotImplementedError(f"format {self.name!r} writes folders, so that it overrides Format.files")
