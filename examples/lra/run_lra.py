r"""Trains a classifier on a task of Long Range Arena: Luna, Mega, or a Transformer with rotary positions.

    python examples/lra/run_lra.py --recipe examples/recipes/lra/text_mega_chunk.yaml \
        --dataset_path data/text --output_dir outputs/text
    python examples/lra/run_lra.py --report outputs/text outputs/image --output_dir outputs/report

`--dataset_path` is a folder that `prepare.py` made, or another with its columns; `--dataset_name` the same on the Hub.
Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import argparse
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as for the scripts beside this folder


from common.arguments import check_choice, check_least, fail
from common.bpe import load_tokenizer
from common.classification import accuracy, write_predictions
from common.data import (
    ClassifierArguments,
    SourceArguments,
    check_columns,
    check_labels,
    check_source,
    check_texts,
    load_splits,
)
from common.model import CheckpointArguments, label_fields, make_config, make_model, pair_class
from common.pictures import undecoded
from common.report import SpeedCallback
from common.scale import total
from common.schedules import power_warmup_schedule
from common.script import Script
from common.training import OrderedTrainer
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
)

import luna_mega
from lra import pretraining, report, transformer
from lra.tasks import (
    CONVENTIONS,
    TASKS,
    choose_splits,
    encode_pictures,
    encode_texts,
    label_names,
    make_collator,
    make_tokenizer,
)

_NO_TOKENS = 8  # vocabulary of a model that reads values


@dataclass
class DataArguments(SourceArguments, ClassifierArguments):
    task: str = field(default="text", metadata={"help": " | ".join(TASKS)})
    convention: str = field(default="ours", metadata={"help": f"of data and evaluation: {' | '.join(CONVENTIONS)}"})
    max_length: int | None = field(default=None, metadata={"help": "positions; default: those of the benchmark"})
    pixels: str | None = field(default=None, metadata={"help": "values | tokens; default: as the convention has it"})
    self_pretraining_steps: int = field(
        default=0, metadata={"help": "first learn to predict masked inputs of the task for N steps"}
    )
    masked_share: float = field(default=0.15, metadata={"help": "share of the inputs that self-pretraining masks"})
    warmup_power: float = field(
        default=1.0, metadata={"help": "2: the learning rate rises with the square of the step; linear schedule only"}
    )


@dataclass
class ModelArguments(CheckpointArguments):
    model_type: str = field(default="luna", metadata={"help": "luna | mega | transformer, or another encoder"})
    paper_model: bool = field(
        default=False, metadata={"help": "the model of the Luna or Mega paper for the task; config_overrides win"}
    )


class LraTrainer(OrderedTrainer):
    """Trainer with the weight decay and the warm-up of the papers."""

    decays_all, warmup_power = False, 1.0

    def get_decay_parameter_names(self, model: PreTrainedModel) -> list[str]:
        names = super().get_decay_parameter_names(model)
        return [name for name, _ in model.named_parameters()] if self.decays_all else names

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        if self.warmup_power == 1.0 or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup, optimizer = self.args.get_warmup_steps(num_training_steps), optimizer or self.optimizer
        self.lr_scheduler = power_warmup_schedule(optimizer, warmup, num_training_steps, self.warmup_power)
        return self.lr_scheduler


class LongRangeArena(Script):
    data_arguments, model_arguments = DataArguments, ModelArguments
    defaults = {"metric_for_best_model": "accuracy", "remove_unused_columns": False}
    title, metric = "Long Range Arena", "eval_accuracy"
    pretraining: dict[str, float] = {}

    def check(self) -> None:
        data = self.data
        check_choice(data, "task", TASKS)
        check_choice(data, "convention", CONVENTIONS)
        if data.pixels is not None:
            check_choice(data, "pixels", ("values", "tokens"))
        super().check()
        check_source(data)
        self.task, self.convention = TASKS[data.task], CONVENTIONS[data.convention]
        self.values = self.task.kind == "pixels" and (data.pixels or self.convention.pixels) == "values"
        data.max_length = self.task.max_length if data.max_length is None else data.max_length
        check_least(data, 4, "max_length")
        check_least(data, 0, "self_pretraining_steps")
        if not 0.0 < data.masked_share < 1.0:
            fail(f"--masked_share {data.masked_share} must be between 0 and 1")
        if data.warmup_power != 1.0 and self.training.lr_scheduler_type != "linear":
            fail(f"--warmup_power {data.warmup_power} needs --lr_scheduler_type linear")
        # Sequences are counted for pairs, all positions of values, which have no padding.
        counted = "no" if self.task.pairs else "all" if self.values else "non_padding"
        self.training.include_num_input_tokens_seen = counted

    def load(self) -> dict[str, Dataset]:
        """Return the splits that the run needs, as the convention has them, with checked columns and labels."""
        data, limits = self.data, self.limits()
        needed = {"train", "validation", "test"} if data.task in self.convention.tests_on else limits
        splits = load_splits(dict.fromkeys(needed), data.dataset_path, data.dataset_name, data.dataset_config)
        splits = choose_splits(splits, data.task, self.convention)
        for name, limit in limits.items():  # a source may be sorted by label
            splits[name] = splits[name] if limit is None else splits[name].shuffle(seed=0).take(limit)
        splits = {name: splits[name] for name in limits}
        self.labels = label_names(next(iter(splits.values())), self.task.classes)
        for name, split in splits.items():
            if self.task.kind == "pixels":
                check_columns(split, name, self.task.columns)
            else:
                check_texts(split, name, self.task.columns)
            check_labels(split, name, self.labels)
        return undecoded(splits)

    def prepare(self) -> None:
        data, task, convention = self.data, self.task, self.convention
        splits, self.tokenizer = self.load(), None if self.values else self.make_tokenizer()
        self.config = self.make_config()
        for name, split in splits.items():
            if task.kind == "pixels":
                self.splits[name] = encode_pictures(split, name, task, self.tokenizer, convention, data.max_length)
            else:
                options = {"keep_in_memory": self.training.world_size == 1, "desc": name}
                self.splits[name] = encode_texts(split, task, self.tokenizer, convention, data.max_length, **options)

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """Load the tokenizer of the model, or make that of the task."""
        if not self.model.model_name_or_path:
            return make_tokenizer(self.task.kind, self.convention, self.data.max_length)
        try:
            return load_tokenizer(self.model.model_name_or_path)
        except (OSError, ValueError) as error:
            fail(f"no tokenizer in {self.model.model_name_or_path}: {error}")

    def make_config(self) -> PreTrainedConfig:
        """Return the configuration; that of a new model has the fields of the paper's model and of the convention."""
        fields = label_fields(self.labels) | {"problem_type": "single_label_classification", "pairs": self.task.pairs}
        if not self.model.model_name_or_path:
            fields = self.paper_fields() | self.convention.fields | fields
        kind = "values" if self.values else "tokens"
        return make_config(self.model, self.tokenizer, self.data.max_length, kind, **fields)

    def paper_fields(self) -> dict[str, Any]:
        """Return the fields of the paper's model where `--paper_model` asks for it."""
        if not self.model.paper_model:
            return {}
        classes = {"luna": luna_mega.LunaConfig, "mega": luna_mega.MegaConfig}
        if self.model.model_type not in classes:
            fail(f"--paper_model: there is none of {self.model.model_type}; pass its sizes as --config_overrides")
        size = _NO_TOKENS if self.tokenizer is None else len(self.tokenizer)
        return getattr(classes[self.model.model_type], self.task.preset)(vocab_size=size).to_diff_dict()

    def make_model(self) -> PreTrainedModel:
        model_class = AutoModelForSequenceClassification
        if self.task.pairs and self.config.model_type != transformer.TransformerConfig.model_type:
            model_class = pair_class(self.config.model_type, f"--task {self.data.task}", "luna, mega or transformer")
        return make_model(model_class, self.model, self.config)

    def build(self) -> Trainer:
        data, training, model = self.data, self.training, self.make_model()
        if data.self_pretraining_steps and training.do_train and not self.model.model_name_or_path:
            options = (self.task, self.tokenizer, training, data.self_pretraining_steps, data.masked_share)
            self.pretraining = pretraining.pretrain(model, self.splits["train"], *options)
        trainer = self.make_trainer(
            model,
            LraTrainer,
            processing_class=self.tokenizer,
            data_collator=make_collator(0 if self.values else self.tokenizer.pad_token_id),
            compute_metrics=accuracy,
        )
        trainer.decays_all, trainer.warmup_power = self.convention.decays_all, data.warmup_power
        return trainer

    def describe(self) -> dict[str, Any]:
        """Return the first entries of the summary; the report groups runs by them."""
        data, training, device = self.data, self.training, self.training.device
        cuda = device.type == "cuda"
        return {
            "task": data.task,
            "variant": report.name_variant(self.config),
            "convention": data.convention,
            "max_length": data.max_length,
            "config_overrides": "".join(self.model.config_overrides.split()),
            "learning_rate": training.learning_rate,
            "batch": training.train_batch_size * training.gradient_accumulation_steps * training.world_size,
            "hardware": torch.cuda.get_device_name(device)
            if cuda
            else f"{platform.machine()} CPU, threads: {torch.get_num_threads()}",
            **super().describe(),
            "self_pretraining_steps": data.self_pretraining_steps,
            **self.pretraining,
        }

    def before_evaluation(self) -> dict[str, Any]:
        """Return the speed of training."""
        callbacks = self.trainer.callback_handler.callbacks
        seconds = sum(callback.seconds for callback in callbacks if isinstance(callback, SpeedCallback))
        (examples,) = total([self.trainer.sequences], self.training)
        return {"examples_per_second": examples / seconds} if seconds else {}

    def predict(self) -> dict[str, Any]:
        """Write the predicted classes of the test split; return their path and the accuracy."""
        return write_predictions(self.trainer, self.splits["test"])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    if "--report" not in (sys.argv[1:] if argv is None else argv):
        return LongRangeArena(argv).run()
    parser = argparse.ArgumentParser(description=report.__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--report", nargs="+", metavar="DIR", required=True, help="outputs of runs, or folders of them")
    parser.add_argument("--output_dir", default="report")
    asked = parser.parse_args(argv)
    return report.write_report(asked.report, Path(asked.output_dir))


if __name__ == "__main__":
    main()
