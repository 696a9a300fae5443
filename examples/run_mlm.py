"""Pretrains a masked language model, from scratch or from a checkpoint, on plain text.

    python examples/run_mlm.py --recipe examples/recipes/mlm/wikitext2_small.yaml --dataset_path DIR --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import time
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from common.arguments import fail, find_checkpoint, parse_arguments
from common.data import check_split, load_files, load_splits, name_data
from common.hub import publish
from common.model import ModelArguments, boundary_ids, make_config, make_model, make_tokenizer
from common.training import OrderedTrainer, check_training, describe, evaluate, finish, train
from datasets import Dataset
from datasets.exceptions import DatasetsError
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name: Salesforce/wikitext"})
    dataset_config: str | None = field(default=None, metadata={"help": "its configuration: wikitext-103-raw-v1"})
    dataset_path: str | None = field(
        default=None, metadata={"help": "local folder: parquet, json(l), csv or txt files, named by split"}
    )
    train_files: list[str] | None = field(default=None, metadata={"help": "local files instead of a folder"})
    validation_files: list[str] | None = field(default=None, metadata={"help": "local files beside --train_files"})
    text_column: str = field(default="text", metadata={"help": "column with the text; a txt file has one text a line"})
    block_size: int = field(default=512, metadata={"help": "tokens of an input, <s> among them"})
    mlm_probability: float = field(default=0.15, metadata={"help": "share of the tokens that are predicted"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only the first N texts"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only the first N texts"})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "processes that tokenize"})


class BlockCollator(DataCollatorForLanguageModeling):
    """Masks blocks anew whenever they are read; those that have labels are masked already."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return default_data_collator(examples) if "labels" in examples[0] else super().torch_call(examples)


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments]:
    data, model, training = parse_arguments((DataArguments, ModelArguments, TrainingArguments), argv)
    check_training(training, model)
    if training.do_predict:
        fail("--do_predict: a language model has no test predictions to write; pass --do_eval")
    if sum(map(bool, (data.dataset_name, data.dataset_path, data.train_files or data.validation_files))) != 1:
        fail("pass one of --dataset_name, --dataset_path, or --train_files and --validation_files")
    if not 0 < data.mlm_probability < 1:
        fail(f"--mlm_probability {data.mlm_probability} must be between 0 and 1")
    if data.block_size < 2:
        fail(f"--block_size {data.block_size} must be at least 2")
    return data, model, training


def load_texts(data: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    limits = {"train": data.max_train_samples} if training.do_train else {}
    limits |= {"validation": data.max_eval_samples} if training.do_eval else {}
    if data.dataset_name or data.dataset_path:
        splits = load_splits(list(limits), data.dataset_path, data.dataset_name, data.dataset_config)
    else:
        files = {"train": data.train_files, "validation": data.validation_files}
        if missing := [name for name in limits if not files[name]]:
            fail(f"pass --{missing[0]}_files as well")
        try:
            splits = load_files({name: files[name] for name in limits})
        except (DatasetsError, OSError, ValueError) as error:
            fail(f"cannot load the files: {error}")
    for name, split in splits.items():
        splits[name] = split = split if limits[name] is None else split.take(limits[name])
        check_split(split, name, (data.text_column,), labels=None)
    return splits


def pack(split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> Dataset:
    """Blocks of `<s>` and `block_size - 1` tokens of the texts, each of which ends with `</s>`.

    Empty texts are skipped. Texts are packed a thousand at a time; what is left of them, less than a block, goes.
    """
    bos, eos = boundary_ids(tokenizer)
    step = data.block_size - 1

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text.strip() for text in batch[data.text_column] if text.strip()]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        stream = list(chain.from_iterable([*ids, eos] for ids in encoded))
        return {"input_ids": [[bos, *stream[end - step : end]] for end in range(step, len(stream) + 1, step)]}

    options = {"batched": True, "remove_columns": split.column_names, "num_proc": data.preprocessing_num_workers}
    blocks = split.map(encode, **options, desc=name)
    if len(blocks) == 0:
        fail(f"split {name} has too little text for one block of {data.block_size} tokens; see --block_size")
    return blocks


def mask_once(blocks: Dataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments, seed: int) -> Dataset:
    """Masks the validation blocks, so that every evaluation sees the same ones."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=data.mlm_probability, seed=seed)

    def mask(batch: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        masked = collator([{"input_ids": ids} for ids in batch["input_ids"]])
        return {name: masked[name] for name in ("input_ids", "labels")}

    return blocks.map(mask, batched=True, keep_in_memory=True, load_from_cache_file=False, desc="masking")


def token_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`[B, T, 2]`: negative log-likelihood of every masked token, and whether it is the best guess.

    `logits` are those of all positions or, of a model with `sparse_prediction`, of the masked ones.
    """
    masked = labels != -100
    logits, targets = (logits[masked] if logits.dim() == 3 else logits).float(), labels[masked]
    scores = logits.new_zeros(*labels.shape, 2)
    loss = cross_entropy(logits, targets, reduction="none")
    scores[masked] = torch.stack([loss, logits.argmax(-1) == targets], dim=-1)
    return scores


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Perplexity and accuracy over the masked tokens."""
    loss, right = prediction.predictions[prediction.label_ids != -100].mean(axis=0, dtype=np.float64)
    return {"perplexity": float(np.exp(loss)), "accuracy": float(right)}


def build_trainer(data: DataArguments, model: ModelArguments, training: TrainingArguments) -> Trainer:
    splits = load_texts(data, training)
    texts = splits["train"][data.text_column] if "train" in splits else ()
    tokenizer = make_tokenizer(model, texts, data.block_size)
    if tokenizer.mask_token_id is None:
        fail("the tokenizer has no mask_token; a masked language model needs one")
    config = make_config(model, tokenizer, data.block_size, sparse_prediction=True)
    blocks = {name: pack(split, name, tokenizer, data) for name, split in splits.items()}
    if "validation" in blocks:
        blocks["validation"] = mask_once(blocks["validation"], tokenizer, data, training.seed)
    return OrderedTrainer(
        model=make_model(AutoModelForMaskedLM, model, config),
        args=training,
        train_dataset=blocks.get("train"),
        eval_dataset=blocks.get("validation"),
        processing_class=tokenizer,
        data_collator=BlockCollator(tokenizer, mlm_probability=data.mlm_probability),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=token_scores,
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    data, model, training = parse(argv)
    base_model, checkpoint = model.model_name_or_path, find_checkpoint(training)
    if checkpoint:  # for its configuration and tokenizer, also when the run began from scratch
        model.model_name_or_path = checkpoint
    set_seed(training.seed)
    trainer = build_trainer(data, model, training)
    summary = describe(trainer, model)
    if training.do_train:
        summary |= train(trainer, checkpoint)
    if training.do_eval:
        summary |= evaluate(trainer)
    summary = finish(trainer, "masked language model", summary, ["eval_perplexity"], start)
    if training.do_train:
        files = [data.dataset_path] if data.dataset_path else data.train_files
        hub = {"dataset": data.dataset_name, "dataset_config": data.dataset_config}
        source = {"dataset": name_data(files)} if files else hub
        publish(trainer, __file__, argv, summary, **source, base_model=base_model, license=model.license)
    return summary


if __name__ == "__main__":
    main()
