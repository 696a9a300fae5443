r"""Train a translation model, from scratch or from a checkpoint, and evaluate it with sacreBLEU.

    python examples/run_translation.py --recipe examples/recipes/translation/multi30k_luna.yaml \
        --dataset_name bentrevett/multi30k --output_dir outputs/multi30k_luna

All fields of Seq2SeqTrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sacrebleu.metrics import BLEU
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerState,
)
from transformers.hf_argparser import HfArg
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from luna_mega import training as lib


def read_pairs(split: Dataset, name: str, source: str, target: str) -> Dataset:
    """Return `source` and `target` of a split with columns named by language, or with a column `translation`."""
    prefix = "translation." if "translation" in split.column_names else ""
    columns = {prefix + source: "source", prefix + target: "target"}
    split = split.flatten()
    lib.check_split(split, name, tuple(columns))
    return split.select_columns(list(columns)).rename_columns(columns)


def encode(pairs: Dataset, name: str, tokenizers: lib.Tokenizers, max_source: int, max_target: int) -> Dataset:
    """Add `input_ids` and `labels`, both with `</s>`, their `lengths` and total `length`, and the index `row`.

    Training pairs with an empty side, or a side longer than `max_source` or `max_target`, are removed. In other splits,
    long sides are truncated, and pairs are sorted by length, so that batches need fewer decoding steps.
    """

    def tokenize(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        inputs, labels = (
            tokenizer([text.strip() for text in batch[side]], verbose=False)["input_ids"]
            for side, tokenizer in zip(("source", "target"), tokenizers, strict=True)
        )
        lengths = [(len(first), len(second)) for first, second in zip(inputs, labels, strict=True)]
        total = list(map(sum, lengths))
        return {"input_ids": inputs, "labels": labels, "lengths": lengths, "length": total, "row": indices}

    def fits(pair: dict[str, Any]) -> bool:
        empty = not pair["source"].strip() or not pair["target"].strip()
        return not empty and len(pair["input_ids"]) <= max_source and len(pair["labels"]) <= max_target

    def cut(pair: dict[str, Any]) -> dict[str, list[int]]:
        limits = {"input_ids": max_source, "labels": max_target}
        return {side: [*pair[side][:-1][: limit - 1], pair[side][-1]] for side, limit in limits.items()}

    encoded = pairs.map(tokenize, batched=True, with_indices=True, desc=name)
    if name != "train":
        return encoded.map(cut, desc=f"{name}: cut").sort("length", reverse=True)
    encoded = encoded.filter(fits, desc=f"{name}: filter")
    if len(encoded) == 0:
        lib.fail("all training pairs are too long; increase --max_source_length and --max_target_length")
    return encoded


class PairCollator(DataCollatorForSeq2Seq):
    """Collator that pads both sides, and removes columns that are not inputs of the model."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        needed = [{name: feature[name] for name in ("input_ids", "labels")} for feature in features]
        return super().__call__(needed, return_tensors)


@dataclass
class DataArguments(lib.SourceArguments, lib.LimitArguments):
    source_lang: str = HfArg(default="en", help="name of the source language in the data")
    target_lang: str = HfArg(default="de", help="name of the target language in the data")
    test_paths: list[str] | None = HfArg(default=None, help="local folders with a split test for --do_predict")
    max_source_length: int = HfArg(default=128, help="maximum tokens of a source, including </s>")
    max_target_length: int = HfArg(default=128, help="maximum tokens of a target, including </s>")
    num_beams: int = HfArg(default=5, help="beams after training; --generation_num_beams: during training")
    length_penalty: float = HfArg(default=1.0, help="exponent of the length in beam search")
    max_tokens: int | None = HfArg(
        default=None,
        help="maximum tokens of each side of a training batch on each device, instead of a number of pairs",
    )
    milestones: list[int] | None = HfArg(default=None, help="steps of decreases, for the schedule constant_with_warmup")
    milestone_factor: float = HfArg(default=0.1, help="factor of the learning rate at a milestone")
    warmup_init_lr: float = HfArg(default=0.0, help="learning rate of the first step; requires --milestones")
    apollo: bool = HfArg(default=False, help="optimizer Apollo with adam_beta1 and adam_epsilon (pytorch_optimizer)")
    clip_each: float | None = HfArg(default=None, help="maximum gradient norm of each parameter")
    average_checkpoints: int = HfArg(default=0, help="number of checkpoints whose mean is evaluated and saved")
    average_by: str = HfArg(default="last", help="checkpoints to average: last, or best by metric_for_best_model")


class TranslationTrainer(lib.OrderedTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer that evaluates translations against the untokenized references with sacreBLEU."""

    def __init__(self, *args, tokenizers: lib.Tokenizers, data: DataArguments, **kwargs):
        self.max_tokens = data.max_tokens
        super().__init__(*args, compute_metrics=self.score, **kwargs)
        self.tokenizers, self.data = tokenizers, data
        self.bleu = BLEU(trg_lang=data.target_lang)
        if data.apollo:
            self.optimizer_cls_and_kwargs = lib.optimization.apollo(self.args)  # not an argument of Seq2SeqTrainer
        if data.clip_each is not None:
            self.add_callback(lib.optimization.ClipEach(data.clip_each))
        if data.milestones is not None:
            start, factor = data.warmup_init_lr / self.args.learning_rate, data.milestone_factor
            self.schedule = lambda optimizer, warmup_steps, _: lib.optimization.milestone_schedule(
                optimizer, warmup_steps, data.milestones, factor, start
            )

    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, *args, **kwargs):
        self.references = list(dataloader.dataset["target"])
        self.gather_function = self.accelerator.gather_for_metrics  # Seq2SeqTrainer's function repeats examples
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
            lib.remove_truncation(self.tokenizers.target)
            self.tokenizers.target.save_pretrained(Path(output_dir or self.args.output_dir, "target"))


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.ModelArguments, Seq2SeqTrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, Seq2SeqTrainingArguments)
    data, model, training = lib.parse_arguments(kinds, argv)
    run = lib.Run(data, model, training)
    if data.source_lang == data.target_lang:
        lib.fail(f"--source_lang and --target_lang are both {data.source_lang}; pass two languages")
    lib.check_least(data, 2, "max_source_length", "max_target_length")
    lib.check_least(data, 1, "num_beams")
    lib.check_least(data, 0, "average_checkpoints")
    lib.check_choice(data, "average_by", ("last", "best"))
    if data.max_tokens is not None:
        longest = max(data.max_source_length, data.max_target_length)
        if data.max_tokens < longest:
            lib.fail(f"--max_tokens {data.max_tokens} is below the {longest} tokens of the longest allowed sentence")
        lib.check_max_tokens(training)
    if data.milestones and training.lr_scheduler_type != "constant_with_warmup":
        lib.fail(
            f"--milestones requires --lr_scheduler_type constant_with_warmup, got {training.lr_scheduler_type.value}"
        )
    if data.milestones and data.milestones != sorted(data.milestones):
        lib.fail(f"--milestones {data.milestones} must be sorted")
    if data.warmup_init_lr and not (data.milestones and 0 < data.warmup_init_lr < training.learning_rate):
        lib.fail(f"--warmup_init_lr {data.warmup_init_lr} requires --milestones and a higher --learning_rate")
    if data.clip_each is not None and (data.clip_each <= 0 or training.max_grad_norm or training.fp16):
        lib.fail(f"--clip_each {data.clip_each} must be above 0, with --max_grad_norm 0 and without --fp16")
    if data.average_checkpoints and run.checkpoint and training.do_train:
        place = Path(run.checkpoint).resolve().parent
        if place != Path(training.output_dir).resolve():
            lib.fail(f"--average_checkpoints needs the earlier checkpoints; pass --output_dir {place}")
    if data.average_checkpoints and training.do_train:
        check_saved(data.average_checkpoints, training)
    return data, model, training, run


def check_saved(count: int, training: Seq2SeqTrainingArguments) -> None:
    """Exit if the last `count` checkpoints would not be there after the training."""
    if training.save_strategy == "no":
        lib.fail(f"--average_checkpoints {count} needs checkpoints; remove --save_strategy no")
    best = training.load_best_model_at_end  # the best checkpoint is one of those that are kept, and can be older
    if training.save_total_limit and training.save_total_limit < count + best:
        needed = f"--save_total_limit {count + best}{' with --load_best_model_at_end' if best else ''}"
        lib.fail(f"--average_checkpoints {count} needs {needed}, or none; it is {training.save_total_limit}")


def load_pairs(data: DataArguments, training: Seq2SeqTrainingArguments) -> dict[str, Dataset]:
    """Return the pairs of the required splits and test sets by name."""
    folders = {}
    if training.do_predict and data.test_paths:
        folders = {Path(path).resolve().name: path for path in data.test_paths}
    limits = lib.choose_splits(training, data, test=() if folders else ("test",))
    if folders and (len(folders) < len(data.test_paths) or folders.keys() & limits.keys()):
        lib.fail(f"--test_paths: the folders must have different names, none of them {' or '.join(limits)}")
    splits = lib.load_splits(limits, data) if limits else {}
    for name, path in folders.items():
        source = lib.SourceArguments(dataset_path=path)
        splits[name] = lib.load_splits({"test": data.max_predict_samples}, source)["test"]
    return {name: read_pairs(split, name, data.source_lang, data.target_lang) for name, split in splits.items()}


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: Seq2SeqTrainingArguments
) -> tuple[dict[str, Dataset], lib.Tokenizers, PreTrainedConfig]:
    """Return the encoded splits, the tokenizers, and the configuration of the model."""
    splits = load_pairs(data, training)
    texts = [*splits["train"]["source"], *splits["train"]["target"]] if "train" in splits else []
    length = max(data.max_source_length, data.max_target_length)
    tokenizers = lib.make_both_tokenizers(model, texts, length)
    start = {"is_encoder_decoder": True, "decoder_start_token_id": tokenizers.target.eos_token_id}
    start, shorten = ({} if model.model_name_or_path else start), (data, "max_source_length")
    config = lib.make_config(model, tokenizers.source, length, shorten=shorten, **start)
    if not config.is_encoder_decoder:
        lib.fail(f"{model.model_name_or_path or model.model_type} is not an encoder-decoder")
    lib.fit_lengths(config, data, "max_target_length", side="decoder")
    if len(tokenizers.target) > (size := getattr(config, "decoder_vocab_size", None) or config.vocab_size):
        lib.fail(f"the target tokenizer has {len(tokenizers.target)} tokens, the decoder only {size}")
    for name, pairs in splits.items():
        splits[name] = encode(pairs, name, tokenizers, data.max_source_length, data.max_target_length)
    return splits, tokenizers, config


def choose_checkpoints(folder: str, count: int, metric: str | None) -> list[Path]:
    """Return the last `count` checkpoints in `folder` or, with a `metric`, the best ones.

    Higher values are better unless the name ends with "loss".
    """
    checkpoints = [path for path in map(Path, sort_checkpoints(folder)) if (path / SAFE_WEIGHTS_NAME).is_file()]
    if len(checkpoints) < count:
        lib.fail(f"{folder} has {len(checkpoints)} checkpoints, too few for --average_checkpoints {count}")
    if metric is not None:
        history = TrainerState.load_from_json(str(checkpoints[-1] / TRAINER_STATE_NAME)).log_history
        scores = {f"{PREFIX_CHECKPOINT_DIR}-{entry['step']}": entry[metric] for entry in history if metric in entry}
        if unknown := [path.name for path in checkpoints if path.name not in scores]:
            lib.fail(f"{unknown[0]} has no {metric}; evaluate whenever a checkpoint is saved")
        checkpoints.sort(key=lambda path: scores[path.name], reverse=metric.endswith("loss"))
    return checkpoints[-count:]


def average(checkpoints: list[Path]) -> dict[str, torch.Tensor]:
    """Return the mean of the weights, summed in float32; integer tensors come from the last checkpoint."""
    total: dict[str, torch.Tensor] = {}
    for path in checkpoints:
        weights = load_file(path / SAFE_WEIGHTS_NAME)
        if total and total.keys() != weights.keys():
            lib.fail(f"{path} contains another model than {checkpoints[0]}")
        for name, tensor in weights.items():
            summed = tensor.is_floating_point() and name in total
            total[name] = total[name] + tensor.float() if summed else tensor
    return {
        name: (total[name] / len(checkpoints)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def average_weights(trainer: TranslationTrainer, folder: str) -> None:
    """Load the mean of several checkpoints in `folder` into the model, and save it."""
    data = trainer.data
    metric = trainer.args.metric_for_best_model or "eval_loss"
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    trainer.accelerator.wait_for_everyone()
    chosen = choose_checkpoints(folder, data.average_checkpoints, metric if data.average_by == "best" else None)
    trainer.accelerator.unwrap_model(trainer.model).load_state_dict(average(chosen), strict=False)
    trainer.save_model(_internal_call=True)
    if trainer.is_world_process_zero():
        print(f"averaged {', '.join(path.name for path in chosen)}", flush=True)


def evaluate(trainer: TranslationTrainer, base_model: str | None, splits: dict[str, Dataset]) -> dict[str, Any]:
    """Average the weights with `--average_checkpoints`; evaluate and write the translations of the validation split."""
    training, data = trainer.args, trainer.data
    if data.average_checkpoints:
        average_weights(trainer, training.output_dir if training.do_train else base_model)
    training.predict_with_generate, training.generation_num_beams = True, data.num_beams
    if not training.do_eval:
        return {}
    metrics = lib.score(trainer)
    write_translations(trainer, splits["validation"], "validation")
    return metrics | lib.save(trainer, "eval", {"bleu_signature": str(trainer.bleu.get_signature())})


def predict(trainer: TranslationTrainer, splits: dict[str, Dataset]) -> dict[str, Any]:
    """Translate the test sets; return the metrics."""
    found = {}
    for name in [name for name in splits if name not in ("train", "validation")]:
        metrics = trainer.predict(splits[name], metric_key_prefix=name).metrics
        found |= lib.save(trainer, name, metrics | {"bleu_signature": str(trainer.bleu.get_signature())})
        write_translations(trainer, splits[name], name)
    return found


def write_translations(trainer: TranslationTrainer, split: Dataset, name: str) -> None:
    """Write the translations of the split `name`, the last ones, in the order of the data."""
    ordered = sorted(zip(split["row"], trainer.translations, strict=True))
    lib.write_lines(trainer, f"translations.{name}.{trainer.data.target_lang}", (text for _, text in ordered))


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    # The collator selects the columns; evaluation requires the texts, and grouping by length the lengths.
    training.remove_unused_columns = False
    training.generation_num_beams = training.generation_num_beams or 1

    with run.reading():
        splits, tokenizers, config = load_data(data, model, training)

    network = lib.make_model(AutoModelForSeq2SeqLM, model, config)
    # `max_length` includes the start token of the decoder.
    beams = {"num_beams": data.num_beams, "length_penalty": data.length_penalty}
    network.generation_config.update(max_length=data.max_target_length + 1, **beams)
    trainer = TranslationTrainer(
        network,
        training,
        tokenizers=tokenizers,
        data=data,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizers.source,
        data_collator=PairCollator(tokenizers.source, network),
    )

    return run.fit(
        trainer,
        evaluate=lambda: evaluate(trainer, run.base_model, splits),
        predict=lambda: predict(trainer, splits),
    )


if __name__ == "__main__":
    main()
