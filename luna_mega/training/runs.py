"""Training runs: checks of the options, checkpoints, training, evaluation, output files, model card and push."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import HfApi, ModelCard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length, sort_checkpoints

from luna_mega._cards import FILE_NAME as CARD_NAME, add_section
from luna_mega.escaping import code, code_block, markdown
from luna_mega.hub.card import license_metadata, task_of
from luna_mega.hub.find import find_model
from luna_mega.hub.folder import remove_truncation
from luna_mega.training.arguments import check_launch, check_least, check_precision, fail, one_line
from luna_mega.training.models import CheckpointArguments
from luna_mega.training.plots import plot_losses
from luna_mega.training.streams import SeededSampler, Stream

Step = Callable[[], dict[str, Any]]  # it returns metrics
RUN_STATE_NAME = "run_state.pt"  # file in a checkpoint, see `OrderedTrainer.run_state`
DIVERGED = "Lower --learning_rate, raise --warmup_steps, or train in float32"


class OrderedTrainer(Trainer):
    """Trainer with predictions in the order of the dataset, and losses independent of the number of processes.

    It also supports a `Stream` as training data, and other schedules and rules of weight decay. Losses of a resumed run
    equal those of an uninterrupted run.

    transformers' Trainer also groups the evaluation set by length, so that predictions do not match their rows. Its
    `eval_loss` is the mean over batches and counts padded examples of the last batch twice.

    Attributes:
        schedule: Function that returns the schedule of the learning rate, instead of `lr_scheduler_type`, from the
            optimizer and the numbers of warmup steps and of all steps.
        decays: Function of the name and the value of a parameter that returns whether it has weight decay, instead of
            all except biases and norms.
    """

    first_step = 0  # step after which losses are summed
    schedule: Callable[[Optimizer, int, int], LRScheduler] | None = None
    decays: Callable[[str, torch.nn.Parameter], bool] | None = None

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, **options: Any):
        needed, split = args.train_batch_size * args.world_size, options.get("train_dataset")
        if args.do_train and args.world_size > 1 and has_length(split) and len(split) < needed:
            batch = f"{args.world_size} processes with --per_device_train_batch_size {args.per_device_train_batch_size}"
            fail(f"{batch} need {needed} examples for a batch; the split train has {len(split)}")
        super().__init__(model, args, **options)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        if self.schedule is not None and self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            self.lr_scheduler = self.schedule(optimizer or self.optimizer, warmup, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        if self.decays is None:
            return super().get_decay_parameter_names(model)
        return [name for name, parameter in model.named_parameters() if self.decays(name, parameter)]

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, Stream):
            return super().get_train_dataloader()
        # The stream is already distributed; Accelerate would distribute it again.
        options = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=collator, **options)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset = train_dataset or self.train_dataset
        # Lengths of the unchanged examples: changing all of them would take as long as an epoch.
        sampler = super()._get_train_sampler(getattr(dataset, "examples", dataset))
        # The order by length of Trainer, and Accelerate's without its own sampler, depend on all random numbers before.
        if isinstance(sampler, LengthGroupedSampler) or not self.args.accelerator_config.use_seedable_sampler:
            return SeededSampler(sampler, self.args.seed)
        return sampler

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self.losses = [0.0, 0.0]  # sum and count
        averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self.args.average_tokens_across_devices = averages
        loss, count = total(self.losses, self.args)
        if count:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / count
        return output

    def prediction_step(self, model, inputs, *args, **kwargs):
        labels = inputs.get("labels")
        count = kept = self._kept(labels)
        regression = labels is not None and labels.is_floating_point()
        if labels is not None and not regression:
            inputs["labels"] = labels = labels.clone()
            labels[kept:] = -100  # ignored by the loss
            count = int((labels != -100).sum())
        loss, logits, found = super().prediction_step(model, inputs, *args, **kwargs)
        logits = logits[0] if isinstance(logits, tuple) else logits  # without the states of an encoder, as of BART
        if count and loss is not None:
            if regression:
                loss = (logits[:kept].float().view_as(found[:kept]) - found[:kept]).square().mean()
            self.losses = [self.losses[0] + float(loss) * count, self.losses[1] + count]
        return loss, logits, found

    def _save(self, output_dir=None, state_dict=None):
        remove_truncation(self.processing_class)
        super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model, trial) -> None:
        check_model(self)  # Trainer also pushes checkpoints
        state = self.run_state()
        if self.args.should_save:
            folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / RUN_STATE_NAME)  # before Trainer writes the file that completes the checkpoint
        super()._save_checkpoint(model, trial)

    def run_state(self) -> dict[str, Any]:
        """Return what changes during training and is in no other file of a checkpoint: the sums of the losses."""
        since_log = total([float(self._tr_loss)], self.args)[0] / self.args.world_size
        return {"losses": (since_log, self._total_loss_scalar, self._globalstep_last_logged)}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Continue with a state of `run_state`; it is empty for checkpoints of earlier versions."""
        self.first_step = 0 if state else self.state.global_step
        if state:
            since_log, self._total_loss_scalar, self._globalstep_last_logged = state["losses"]
            self._tr_loss.fill_(since_log)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "train_loss" in logs:  # Trainer's is the mean over the steps after resuming
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step - self.first_step, 1)
        super().log(logs, *args, **kwargs)

    def report(self, scores: dict[str, float], prefix: str) -> dict[str, float]:
        """Log the scores of an evaluation, and return them with the prefix."""
        metrics = {f"{prefix}_{name}": value for name, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _kept(self, labels: torch.Tensor | None) -> int:
        """Return the number of examples in a batch without those that Accelerate repeats to fill the last batch."""
        state, size = self.accelerator.gradient_state, 0 if labels is None else len(labels)
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(max(state.remainder - self.args.process_index * size, 0), size)


class Run:
    """A training run: checked options, the state of the run, and its steps.

    A script creates its run when it has parsed the options. It reads the data in `reading`, and ends with `fit`:

        with run.reading():
            splits = load_data()
        trainer = OrderedTrainer(...)
        return run.fit(trainer)

    Attributes:
        checkpoint: Checkpoint from which the run resumes.
        base_model: Model that is fine-tuned.
    """

    def __init__(self, data: object, model: CheckpointArguments, training: TrainingArguments, *, predicts: bool = True):
        """Exit if options contradict each other; find the checkpoint to resume from, and set the seed.

        A resumed run loads configuration and tokenizer from its checkpoint, even if it was started from scratch.
        `predicts` specifies whether the script supports `--do_predict`.
        """
        check_launch(training.world_size)
        check_precision(training)
        if training.world_size > 1 and training.device.type == "cpu":  # Trainer sets ddp_timeout only for accelerators
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=training.ddp_timeout))
        if training.do_predict and not predicts:
            fail("--do_predict: this script has no test predictions; pass --do_eval")
        _check_options(data, model, training)
        if training.include_num_input_tokens_seen == "no":  # Trainer logs the speed of counted tokens
            training.include_num_input_tokens_seen = "non_padding"
        self.data, self.training = data, training
        self.base_model, self.license = model.model_name_or_path, model.license
        self.checkpoint = find_checkpoint(training)
        if self.checkpoint and training.do_train:
            _check_resumed(self.checkpoint, training)
        model.model_name_or_path = self.checkpoint or (self.base_model and find_model(self.base_model))
        set_seed(training.seed)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which the main process reads the data first; invalid data end the script with one line."""
        with self.training.main_process_first(desc="reading the data"), one_line():
            yield

    def fit(
        self,
        trainer: Trainer,
        *,
        evaluate: Step | None = None,
        predict: Step | None = None,
        describe: Callable[..., None] | None = None,
    ) -> dict[str, Any]:
        """Train, evaluate, predict and publish the model, as the options specify; return all metrics.

        If an evaluation raises an error, the model is saved, but not published. The plot `training.png` contains the
        losses and the metrics of all evaluations.

        Args:
            trainer: Trainer of the model.
            evaluate: Function that returns the metrics after training; by default, `score`.
            predict: Function that predicts the test splits and returns their metrics, with `--do_predict`.
            describe: Function that completes the model card; by default, `complete_card`.
        """
        callbacks = [EpochCallback(), DivergenceCallback()]
        if patience := getattr(self.data, "early_stopping_patience", None):
            callbacks.append(EarlyStoppingCallback(patience))
            callbacks[-1].early_stopping_patience_counter = count_worse(self.checkpoint)
        if self.checkpoint:
            callbacks.append(ResumeCallback(trainer, self.checkpoint))
        if trainer.pop_callback(ProgressCallback):  # Trainer has none with --disable_tqdm or in a notebook
            callbacks.append(ProgressBar())
        for callback in callbacks:
            trainer.add_callback(callback)
        metrics = self._train(trainer) if self.training.do_train else {}
        metrics |= evaluate() if evaluate else score(trainer)
        if predict is not None and self.training.do_predict:
            metrics |= predict()
        if self.training.do_train:
            trainer.save_state()  # with the evaluations
            if trainer.is_world_process_zero():
                output = Path(self.training.output_dir)
                with suppress(ValueError):  # nothing was logged, as by a run that resumes after its last step
                    plot_losses({output.resolve().name: output}, output / "training.png")
            (describe or complete_card)(trainer, self.base_model, self.license, describe_source(self.data))
            publish(trainer)
        return metrics

    def _train(self, trainer: Trainer) -> dict[str, Any]:
        patience = getattr(self.data, "early_stopping_patience", None)
        if self.checkpoint and load_finished(trainer, self.checkpoint, patience):
            metrics = {"epoch": trainer.state.epoch}
        else:
            metrics = trainer.train(resume_from_checkpoint=self.checkpoint).metrics
        check_model(trainer)
        if trainer.is_fsdp_enabled:  # for the final model
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(_internal_call=True)  # `publish` pushes the model with its card
        trainer.save_state()
        if has_length(trainer.train_dataset):
            metrics["train_samples"] = len(trainer.train_dataset)
        return save(trainer, "train", metrics)


def _check_options(data: object, model: CheckpointArguments, training: TrainingArguments) -> None:
    if not (training.do_train or training.do_eval or training.do_predict):
        fail("nothing to do; pass --do_train, --do_eval or --do_predict")
    if not (training.do_train or model.model_name_or_path):
        fail("--do_eval and --do_predict without --do_train need --model_name_or_path")
    if getattr(data, "early_stopping_patience", None) is not None:
        check_least(data, 1, "early_stopping_patience")
        if not training.load_best_model_at_end:
            needed = "--load_best_model_at_end with equal --eval_strategy and --save_strategy"
            fail(f"--early_stopping_patience needs {needed}")
    if training.push_to_hub or training.hub_token or model.license:
        check_hub(training, model.license)
    if getattr(data, "streaming", False):
        if training.do_train and training.max_steps <= 0:
            fail("--streaming needs --max_steps, because the length of the data is unknown")
        if training.dataloader_num_workers > 1:
            fail(f"--dataloader_num_workers {training.dataloader_num_workers}: --streaming supports at most 1 worker")
        check_least(data, 1, "shuffle_buffer")


def check_hub(training: TrainingArguments, license: str | None = None) -> None:
    """Exit if the license is invalid or the model cannot be pushed."""
    with one_line("--license"):
        license_metadata(license)
    if training.hub_token:
        fail("--hub_token: Trainer would push it with training_args.bin; use `hf auth login` or HF_TOKEN instead")
    if training.push_to_hub:
        with one_line("--push_to_hub"):
            HfApi().whoami()


def find_checkpoint(training: TrainingArguments) -> str | None:
    """Return the checkpoint of `--resume_from_checkpoint`, or None.

    `last` is the newest complete checkpoint in the output folder; the newest one is incomplete if the run was killed
    while it saved. A run that does not resume exits if the output folder contains checkpoints.
    """
    found = [Path(path) for path in reversed(sort_checkpoints(training.output_dir))]
    source = training.resume_from_checkpoint
    if not source:
        if found and training.do_train:
            fail(f"{found[0]} already exists; pass --resume_from_checkpoint last, or another --output_dir")
        return None
    for path in found if source == "last" else [Path(source)]:
        if is_complete(path):
            return str(path)
    fail(f"--resume_from_checkpoint {source}: no checkpoint there")


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the state, which Trainer writes last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return True


def _check_resumed(checkpoint: str, training: TrainingArguments) -> None:
    """Exit if a resumed run would differ from an uninterrupted one."""
    if training.ignore_data_skip:
        fail("--ignore_data_skip: a resumed run would train on other data; remove it")
    if training.dataloader_persistent_workers:  # DataLoader draws a number for new workers only
        fail(
            "--dataloader_persistent_workers true: dropout of the resumed run would differ from an uninterrupted run; "
            "remove it, if that is acceptable"
        )
    if not any(Path(checkpoint).glob("rng_state*.pth")):
        advice = f"remove --resume_from_checkpoint, and pass --model_name_or_path {checkpoint} and a new --output_dir"
        fail(f"{checkpoint} has no optimizer, because it was saved with --save_only_model; {advice}")
    training.eval_on_start = False  # the run has started before


def count_worse(checkpoint: str | None) -> int:
    """Return the number of evaluations without a better metric before a checkpoint, for early stopping."""
    if checkpoint is None:
        return 0
    callbacks = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).stateful_callbacks
    attributes = callbacks.get(EarlyStoppingCallback.__name__, {}).get("attributes", {})
    return attributes.get("early_stopping_patience_counter", 0)


def load_finished(trainer: Trainer, checkpoint: str, patience: int | None = None) -> bool:
    """Load the state of the last checkpoint of a run; return whether it is. Trainer would train another step.

    The run has all steps, or was stopped after `patience` evaluations without a better metric.
    """
    args, state = trainer.args, TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    stopped = patience is not None and count_worse(checkpoint) >= patience
    if not (stopped or 0 < args.max_steps <= state.global_step):
        return False
    trainer.state = state
    if args.load_best_model_at_end and state.best_model_checkpoint:
        trainer._load_best_model()
    return True


def check_model(trainer: Trainer) -> None:
    """Exit unless the training loss and all weights are finite."""
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    weights = trainer.model.state_dict().values()
    shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in weights]
    own = sum(not torch.isfinite(tensor).all() for tensor in shards if tensor.is_floating_point())
    (broken,) = total([float(own)], trainer.args)
    if broken or not all(map(math.isfinite, losses[-1:])):
        fail(
            f"the training diverged: train_loss={losses[-1] if losses else None} and {broken:.0f} tensors of weights "
            f"are not finite; no model was saved. {DIVERGED}"
        )


class DivergenceCallback(TrainerCallback):
    """Exit at the first logged gradient norm that is NaN."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        is_nan = math.isnan(float((logs or {}).get("grad_norm", 0.0)))
        if is_nan and not args.fp16:  # the gradient scaler skips such steps
            fail(f"the gradients are NaN at step {state.global_step}; no model was saved. {DIVERGED}")


class ProgressBar(ProgressCallback):
    """Progress bar that estimates the remaining time without the first step and the steps before a resumed run.

    The first step also loads libraries and allocates memory, and can take 20 times as long as the others.
    """

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero and self.current_step == 0:
            bar, self.current_step = self.training_bar, state.global_step
            bar.n = bar.last_print_n = bar.initial = state.global_step
            bar.unpause()
            bar.refresh()
        else:
            super().on_step_end(args, state, control, **kwargs)


class ResumeCallback(TrainerCallback):
    """Load the state of the run from a checkpoint when the training begins."""

    def __init__(self, trainer: OrderedTrainer, checkpoint: str):
        self.trainer, self.file = trainer, Path(checkpoint, RUN_STATE_NAME)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        saved = torch.load(self.file, map_location=args.device, weights_only=True) if self.file.exists() else {}
        self.trainer.load_run_state(saved)
        # Trainer requires the entry, which is missing if the run had no early stopping.
        state.stateful_callbacks.setdefault(EarlyStoppingCallback.__name__, {})


class EpochCallback(TrainerCallback):
    """Set the epoch of dataset and sampler, which Accelerate omits with several processes and in a resumed epoch.

    A checkpoint at the end of an epoch is saved after the logs and evaluations of that epoch, because a run that
    resumes there continues with the next epoch.
    """

    saves_epoch = False

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.saves_epoch = control.should_save and state.epoch == int(state.epoch)
        control.should_save = control.should_save and not self.saves_epoch

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        control.should_save = control.should_save or self.saves_epoch
        self.saves_epoch = False

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        epoch = int(state.epoch + 1e-6)
        for part in (train_dataloader, train_dataloader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


def total(values: list[float], training: TrainingArguments) -> list[float]:
    """Return the sums of `values` over all processes."""
    if training.world_size == 1:
        return values
    sums = torch.tensor(values, dtype=torch.float64, device=training.device)
    dist.all_reduce(sums)
    return sums.tolist()


def save(trainer: Trainer, split: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Log and save the metrics of a split; return them. The loss of rows without labels is NaN, and is omitted."""
    metrics = {name: value for name, value in metrics.items() if value == value}
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)
    return metrics


def score(trainer: Trainer) -> dict[str, float]:
    """With `--do_eval`, evaluate and save the metrics; return them."""
    if not trainer.args.do_eval:
        return {}
    metrics = trainer.evaluate()
    if broken := [name for name, value in metrics.items() if name.endswith("_loss") and not math.isfinite(value)]:
        fail(f"{broken[0]} is {metrics[broken[0]]}; the model is not published. {DIVERGED}")
    return save(trainer, "eval", metrics)


def write_lines(trainer: Trainer, name: str, lines: Iterable[str]) -> None:
    """Write `lines` to the file `name` in the output folder."""
    path = Path(trainer.args.output_dir, name)
    if trainer.is_world_process_zero():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def describe_source(data: object) -> dict[str, str | None]:
    """Return the arguments of `Trainer.create_model_card` for the dataset; of local paths, only the last part."""
    paths = getattr(data, "train_files", None) or data.dataset_path or data.dataset_name
    if paths is None:
        return {}
    paths = paths if isinstance(paths, list) else [paths]
    if paths == [data.dataset_name] and not Path(data.dataset_name).exists():
        return {"dataset": data.dataset_name, "dataset_tags": data.dataset_name, "dataset_args": data.dataset_config}
    return {"dataset": markdown(" and ".join(Path(path).resolve().name for path in paths))}


def publish(trainer: Trainer) -> None:
    """After training, write README.md and, with `--push_to_hub`, push the output folder."""
    if not trainer.args.push_to_hub:
        trainer.create_model_card()
        return
    output = trainer.args.output_dir
    again = f'hf upload {trainer.hub_model_id} {output} . --exclude "checkpoint-*"'
    with one_line(f"the push failed, but {output} is complete; push it with `{again}`", RuntimeError):
        trainer.push_to_hub()


def _loading_section(model_class: str, place: str, output: Path) -> str:
    """Return the section of a card with the code that loads a model of transformers, and its tokenizer if any."""
    names = {"model": model_class}
    if (output / "tokenizer_config.json").is_file():
        names["tokenizer"] = "AutoTokenizer"
    lines = [f"from transformers import {', '.join(sorted(names.values()))}", ""]
    lines += [f"{name} = {kind}.from_pretrained({json.dumps(place)})" for name, kind in names.items()]
    return "\n".join(["## Load this model", "", code_block("\n".join(lines), "python"), ""])


def complete_card(trainer: Trainer, base: str | None, license: str | None, source: dict[str, str | None]) -> None:
    """Let `Trainer.create_model_card`, which `push_to_hub` calls, write dataset, task, base model and license.

    `source` are its arguments for the dataset.
    """
    output, config = Path(trainer.args.output_dir), trainer.model.config
    is_local = base is not None and Path(base).exists()
    # transformers reads the name of a new model, which is empty, as the name of a base model on the Hub.
    config.name_or_path = output if base is None or is_local else base
    metadata, write = license_metadata(license), trainer.create_model_card
    model_class = type(trainer.model).__name__.removeprefix("FSDP")  # FSDP2 adds a prefix
    about: dict[str, Any] = {"model_name": (trainer.args.hub_model_id or output.resolve().name).split("/")[-1]}
    about |= {"tags": [config.model_type], "tasks": task_of(model_class, config), "license": metadata.get("license")}

    def create_model_card(**options: Any) -> None:
        write(**options | about | source)
        if not trainer.is_world_process_zero():
            return
        card = ModelCard.load(output / CARD_NAME, ignore_metadata_errors=True)
        card.data.license_name = metadata.get("license_name")
        card.text = re.sub(r"\n## [^\n]+\n\nMore information needed\n", "", card.text)
        if "from_pretrained" not in card.text:  # models of transformers
            place = trainer.args.hub_model_id or about["model_name"]
            card.text = add_section(card.text, _loading_section(model_class, place, output))
        if is_local:
            name = code(Path(base).resolve().name)
            card.text = card.text.replace("was trained from scratch", f"was fine-tuned from {name}", 1)
        card.save(output / CARD_NAME)

    trainer.create_model_card = create_model_card
