"""Trains a translation model, from scratch or from a checkpoint, and scores what it translates with sacreBLEU.

    python examples/run_translation.py --recipe examples/recipes/translation/multi30k_luna.yaml \
        --dataset_path ../shared/data/multi30k_en_de --output_dir outputs/multi30k_luna

Every field of Seq2SeqTrainingArguments is an option; the values of a recipe are defaults that the command line
overrides.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common.arguments import fail, find_checkpoint, parse_arguments
from common.averaging import average, choose_checkpoints
from common.data import load_splits, name_data
from common.hub import publish
from common.model import ModelArguments, make_config, make_model
from common.schedules import milestone_schedule
from common.training import OrderedTrainer, check_training, describe, evaluate, finish, train
from common.translation import PairCollator, Tokenizers, encode, make_tokenizers, read_pairs
from datasets import Dataset
from sacrebleu.metrics import BLEU
from transformers import (
    AutoModelForSeq2SeqLM,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class DataArguments:
    source_lang: str = field(default="en", metadata={"help": "language that is translated: its name in the data"})
    target_lang: str = field(default="de", metadata={"help": "language that it is translated into"})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name: wmt/wmt14"})
    dataset_config: str | None = field(default=None, metadata={"help": "its configuration: de-en"})
    dataset_path: str | None = field(
        default=None, metadata={"help": "local folder: parquet, json(l) or csv files, named by split"}
    )
    test_paths: list[str] | None = field(
        default=None, metadata={"help": "local folders: --do_predict translates their split test, not the data set's"}
    )
    max_source_length: int = field(default=128, metadata={"help": "tokens of a source, </s> among them"})
    max_target_length: int = field(default=128, metadata={"help": "tokens of a target, </s> among them"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_predict_samples: int | None = field(default=None, metadata={"help": "use only the first N"})


@dataclass
class MethodArguments:
    num_beams: int = field(
        default=5, metadata={"help": "beams of the evaluation at the end; --generation_num_beams is for training"}
    )
    length_penalty: float = field(default=1.0, metadata={"help": "power of the length that scores are divided by"})
    milestones: list[int] | None = field(
        default=None,
        metadata={"help": "steps that lower the learning rate; with lr_scheduler_type constant_with_warmup"},
    )
    milestone_factor: float = field(default=0.1, metadata={"help": "what a milestone multiplies the learning rate by"})
    average_checkpoints: int = field(
        default=0, metadata={"help": "evaluate and save the mean of N checkpoints, of this or of an earlier run"}
    )
    average_by: str = field(default="last", metadata={"help": "which: last, or best by metric_for_best_model"})


class TranslationTrainer(OrderedTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer that scores translations against the references as they were given, with sacreBLEU."""

    def __init__(self, *args, tokenizers: Tokenizers, method: MethodArguments, language: str, **kwargs):
        super().__init__(*args, compute_metrics=self.score, **kwargs)
        self.tokenizers, self.method = tokenizers, method
        self.bleu = BLEU(trg_lang=language)

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.method.milestones is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        self.lr_scheduler = milestone_schedule(
            optimizer or self.optimizer, warmup, self.method.milestones, self.method.milestone_factor
        )
        return self.lr_scheduler

    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, *args, **kwargs):
        self.references = list(dataloader.dataset["target"])
        loss_only = prediction_loss_only or not self.args.predict_with_generate
        return super().evaluation_loop(dataloader, description, loss_only, *args, **kwargs)

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        tokenizer = self.tokenizers.target
        ids = np.where(prediction.predictions < 0, tokenizer.pad_token_id, prediction.predictions)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        self.translations = [" ".join(text.split()) for text in texts]
        return {"bleu": self.bleu.corpus_score(self.translations, [self.references]).score}

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.tokenizers.target is not self.tokenizers.source:
            self.tokenizers.target.save_pretrained(Path(output_dir or self.args.output_dir, "target"))


def parse(argv: list[str] | None) -> tuple[DataArguments, MethodArguments, ModelArguments, Seq2SeqTrainingArguments]:
    kinds = (DataArguments, MethodArguments, ModelArguments, Seq2SeqTrainingArguments)
    data, method, model, training = parse_arguments(kinds, argv)
    check_training(training, model)
    needs_data = training.do_train or training.do_eval or not data.test_paths
    if needs_data and (data.dataset_name is None) == (data.dataset_path is None):
        fail("pass one of --dataset_name and --dataset_path")
    for name in ("max_source_length", "max_target_length"):
        if getattr(data, name) < 2:
            fail(f"--{name} {getattr(data, name)} must be at least 2")
    if method.num_beams < 1:
        fail(f"--num_beams {method.num_beams} must be at least 1")
    if method.milestones and training.lr_scheduler_type != "constant_with_warmup":
        fail(f"--milestones: not with --lr_scheduler_type {training.lr_scheduler_type}, but constant_with_warmup")
    if method.milestones and method.milestones != sorted(method.milestones):
        fail(f"--milestones {method.milestones} must be in order")
    if method.average_by not in ("last", "best"):
        fail(f"--average_by {method.average_by} must be last or best")
    if method.average_checkpoints > (training.save_total_limit or method.average_checkpoints):
        fail(f"--average_checkpoints {method.average_checkpoints} is above --save_total_limit")
    return data, method, model, training


def load(data: DataArguments, training: Seq2SeqTrainingArguments) -> dict[str, Dataset]:
    """The splits of the data set that are needed and, by name, the test sets."""
    limits = {"train": data.max_train_samples} if training.do_train else {}
    limits |= {"validation": data.max_eval_samples} if training.do_eval else {}
    limits |= {"test": data.max_predict_samples} if training.do_predict and not data.test_paths else {}
    loaded = load_splits(list(limits), data.dataset_path, data.dataset_name, data.dataset_config) if limits else {}
    if training.do_predict and data.test_paths:
        folders = {Path(path).resolve().name: path for path in data.test_paths}
        if len(folders) < len(data.test_paths) or folders.keys() & limits.keys():
            fail(f"--test_paths: the folders need names of their own, other than {' and '.join(limits)}")
        loaded |= {name: load_splits(["test"], path, "", None)["test"] for name, path in folders.items()}
    pairs = {}
    for name, split in loaded.items():
        limit = limits.get(name, data.max_predict_samples)
        split = split if limit is None else split.take(limit)
        pairs[name] = read_pairs(split, name, data.source_lang, data.target_lang)
    return pairs


def build_trainer(
    data: DataArguments,
    method: MethodArguments,
    model: ModelArguments,
    training: Seq2SeqTrainingArguments,
    splits: dict[str, Dataset],
) -> TranslationTrainer:
    """`splits` is filled with what is encoded."""
    texts = [*splits["train"]["source"], *splits["train"]["target"]] if "train" in splits else []
    length = max(data.max_source_length, data.max_target_length)
    tokenizers = make_tokenizers(model, texts, length)
    start = {"is_encoder_decoder": True, "decoder_start_token_id": tokenizers.target.eos_token_id}
    config = make_config(model, tokenizers.source, length, **({} if model.model_name_or_path else start))
    if not config.is_encoder_decoder:
        fail(f"{model.model_name_or_path} is no encoder-decoder")
    if len(tokenizers.target) > (size := getattr(config, "decoder_vocab_size", None) or config.vocab_size):
        fail(f"the target's tokenizer has {len(tokenizers.target)} entries, the decoder only {size}")
    for name, pairs in splits.items():
        splits[name] = encode(pairs, name, tokenizers, data.max_source_length, data.max_target_length)
    net = make_model(AutoModelForSeq2SeqLM, model, config)
    net.generation_config.update(
        # generate counts the token that the decoder starts with.
        max_length=data.max_target_length + 1,
        num_beams=method.num_beams,
        length_penalty=method.length_penalty,
    )
    return TranslationTrainer(
        model=net,
        args=training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizers.source,
        data_collator=PairCollator(tokenizers.source, net),
        tokenizers=tokenizers,
        method=method,
        language=data.target_lang,
    )


def average_run(trainer: TranslationTrainer, method: MethodArguments, folder: str) -> dict[str, Any]:
    """Gives the model the mean of the checkpoints in `folder`, and saves it; returns the rows of the summary."""
    metric = trainer.args.metric_for_best_model or "eval_loss"
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    trainer.accelerator.wait_for_everyone()
    chosen = choose_checkpoints(folder, method.average_checkpoints, metric if method.average_by == "best" else None)
    trainer.accelerator.unwrap_model(trainer.model).load_state_dict(average(chosen), strict=False)
    trainer.save_model(_internal_call=True)
    return {"averaged": ", ".join(path.name for path in chosen)}


def write_translations(trainer: TranslationTrainer, split: Dataset, name: str, language: str) -> str:
    """Writes the translations of `split`, which were made last, in the order of the data."""
    path = Path(trainer.args.output_dir, f"translations.{name}.{language}")
    if trainer.is_world_process_zero():
        path.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(zip(split["row"], trainer.translations, strict=True))
        path.write_text("".join(f"{text}\n" for _, text in ordered), encoding="utf-8")
    return str(path)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    data, method, model, training = parse(argv)
    base_model, checkpoint = model.model_name_or_path, find_checkpoint(training)
    if checkpoint:  # for its configuration and tokenizers, also when the run began from scratch
        model.model_name_or_path = checkpoint
    set_seed(training.seed)
    # The collator takes what it needs; the texts are for the score, the lengths for the batches.
    training.remove_unused_columns = False
    training.generation_num_beams = training.generation_num_beams or 1
    splits = load(data, training)
    tests = [name for name in splits if name not in ("train", "validation")]
    trainer = build_trainer(data, method, model, training, splits)
    summary = describe(trainer, model)
    if training.do_train:
        summary |= {"vocabulary": len(trainer.tokenizers.source)} | train(trainer, checkpoint)
    history = list(trainer.state.log_history)
    if method.average_checkpoints:
        summary |= average_run(trainer, method, training.output_dir if training.do_train else base_model)
    training.predict_with_generate, training.generation_num_beams = True, method.num_beams
    if training.do_eval:
        summary |= evaluate(trainer)
        summary["translations"] = write_translations(trainer, splits["validation"], "validation", data.target_lang)
    for name in tests:
        metrics = trainer.predict(splits[name], metric_key_prefix=name).metrics
        summary |= {f"{name}_{key}": metrics[f"{name}_{key}"] for key in ("loss", "bleu", "runtime")}
        summary[f"{name}_translations"] = write_translations(trainer, splits[name], name, data.target_lang)
    if training.do_eval or tests:
        summary["bleu_signature"] = str(trainer.bleu.get_signature())
    trainer.state.log_history = history  # the curve is of training, not of beams and means of checkpoints
    summary = finish(trainer, f"{data.source_lang}-{data.target_lang} translation", summary, ["eval_bleu"], start)
    if training.do_train:
        hub = {"dataset": data.dataset_name, "dataset_config": data.dataset_config}
        source = {"dataset": name_data([data.dataset_path])} if data.dataset_path else hub
        publish(trainer, __file__, argv, summary, **source, base_model=base_model, license=model.license)
    return summary


if __name__ == "__main__":
    main()
