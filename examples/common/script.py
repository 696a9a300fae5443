"""A training script as a class: what every task does in the same order, and the places where a task does its own."""

import inspect
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainingArguments, set_seed

from common.arguments import fail, find_checkpoint, parse_arguments
from common.data import name_source
from common.hub import publish
from common.model import ModelArguments
from common.scale import EpochCallback, ScaleArguments, check_batch, check_launch, check_scale, set_timeout
from common.training import OrderedTrainer, check_training, describe, evaluate, finish, train
from common.weight_average import FILE_NAME, AverageArguments, add_average, check_average

MEMORY_HINT = (
    "What helps: a smaller --per_device_train_batch_size (or --per_device_eval_batch_size) with more "
    "--gradient_accumulation_steps; --gradient_checkpointing true; --bf16 true; --config_overrides unpad_inputs=true "
    "where batches are padded; attention in chunks in a Mega (use_chunking=true,chunk_size=128)"
)


class Script(ABC):
    """One run of a training script, from its command line to the model card.

    A script derives a class that names its options, reads and encodes data in `prepare`, and makes model and Trainer in
    `build`. It overrides the other methods where the task differs, and has a method `predict` if it writes predictions
    for test data. The dictionaries that they return are entries of the summary.

    Attributes:
        data_arguments, model_arguments, training_arguments: dataclasses of the options.
        defaults: values of options that differ from those of the dataclasses.
        title: headline of the summary and of the curve.
        metric: what is drawn beside the losses ("eval_accuracy").
        streams: whether `--streaming` has a meaning for the task.
        head_share: share of the tokens that the head scores.
        splits: the encoded data by name; `prepare` fills them in.
        trainer: what `build` returned.
        base_model: the model that the options name, also when a checkpoint is resumed.
    """

    data_arguments: ClassVar[type]
    model_arguments: ClassVar[type] = ModelArguments
    training_arguments: ClassVar[type] = TrainingArguments
    defaults: ClassVar[dict[str, Any]] = {}
    title: str
    metric: str
    streams: ClassVar[bool] = False
    head_share: float = 1.0

    def __init__(self, argv: list[str] | None = None):
        self.start, self.argv = time.perf_counter(), argv
        kinds = (self.data_arguments, self.model_arguments, self.training_arguments, ScaleArguments, AverageArguments)
        parsed = parse_arguments(kinds, argv, **self.defaults)
        self.data, self.model, self.training, self.scale, self.average = parsed
        self.splits: dict[str, Dataset] = {}
        check_launch(self.training.world_size)
        set_timeout(self.training)
        self.check()

    def check(self) -> None:
        """End the script when options contradict each other; called before anything is read."""
        if self.training.do_predict and not hasattr(self, "predict"):
            fail(f"--do_predict: a {self.title} has no test predictions to write; pass --do_eval")
        check_training(self.training, self.model, getattr(self.data, "early_stopping_patience", None))
        if self.scale.streaming and not self.streams:
            fail(f"--streaming: the data of {self.title} are read whole; only those of language models can be streamed")
        check_scale(self.training, self.scale)
        check_average(self.average, self.training)

    def limits(self, validation: tuple[str, ...] = ("validation",), test: tuple[str, ...] = ("test",)) -> dict:
        """Return the splits that the run reads, with the number of rows to use of each (None = all)."""
        training, splits = self.training, {}
        for needed, names, limit in (
            (training.do_train, ("train",), "max_train_samples"),
            (training.do_eval, validation, "max_eval_samples"),
            (training.do_predict, test, "max_predict_samples"),
        ):
            splits |= dict.fromkeys(names, getattr(self.data, limit, None)) if needed else {}
        return splits

    @abstractmethod
    def prepare(self) -> None:
        """Read and encode the data; the other processes do so after the main one and find its files."""

    @abstractmethod
    def build(self) -> Trainer:
        """Make the model and return its Trainer."""

    def make_trainer(self, model: PreTrainedModel, trainer_class: type[Trainer] = OrderedTrainer, **options) -> Trainer:
        """Make a Trainer with the splits "train" and "validation", unless `options` hold others."""
        patience = getattr(self.data, "early_stopping_patience", None)
        options.setdefault("train_dataset", self.splits.get("train"))
        options.setdefault("eval_dataset", self.splits.get("validation"))
        options["callbacks"] = [EpochCallback(), *([EarlyStoppingCallback(patience)] if patience else [])]
        if self.training.do_train and not self.scale.streaming:
            check_batch(self.training, options["train_dataset"])
        return trainer_class(model=model, args=self.training, **options)

    def describe(self) -> dict[str, Any]:
        """Return the first entries of the summary."""
        return describe(self.trainer, self.base_model or f"{self.model.model_type} from scratch")

    def before_evaluation(self) -> dict[str, Any]:
        """Prepare the model for the evaluation at the end, whether it was trained or loaded."""
        return {}

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model on the validation data."""
        return evaluate(self.trainer)

    def source(self) -> dict[str, str | None]:
        """Return the data set as the model card names it."""
        return name_source(self.data.dataset_path, self.data.dataset_name, self.data.dataset_config)

    def run(self) -> dict[str, Any]:
        """Train, evaluate and predict as the options ask; print, save and return the summary."""
        try:
            return self.run_steps()
        except torch.OutOfMemoryError as error:
            reason = str(error).strip().partition(". ")[0]
            fail(f"{reason}. {MEMORY_HINT}")

    def run_steps(self) -> dict[str, Any]:
        """Do what `run` does."""
        files = [FILE_NAME] if self.average.ema_decay else []
        self.base_model, checkpoint = self.model.model_name_or_path, find_checkpoint(self.training, *files)
        if checkpoint:  # for its configuration and tokenizer, also when the run began from scratch
            self.model.model_name_or_path = checkpoint
        set_seed(self.training.seed)
        with self.training.main_process_first(desc="reading the data"):
            self.prepare()
        self.trainer = self.build()
        if self.average.ema_decay:
            add_average(self.trainer, self.average.ema_decay, checkpoint)
        summary = {"task": self.title, "metric": self.metric} | self.describe()
        if self.training.do_train:
            summary |= train(self.trainer, checkpoint, self.scale.peak_flops, self.head_share)
        summary |= self.before_evaluation()
        if self.training.do_eval:
            summary |= self.evaluate()
        if self.training.do_predict:
            summary |= self.predict()
        summary = finish(self.trainer, self.title, summary, [self.metric], self.start)
        if self.training.do_train:
            self.publish(summary)
        return summary

    def publish(self, summary: dict[str, Any]) -> None:
        """Write the model card and push the output folder where `--push_to_hub` asks for it."""
        source = self.source() | {"base_model": self.base_model, "license": self.model.license}
        publish(self.trainer, inspect.getfile(type(self)), self.argv, summary, **source)
