r"""Pretrain a masked language model, from scratch or from a checkpoint, on plain text.

    python examples/run_mlm.py --recipe examples/recipes/mlm/wikitext2_small.yaml \
        --dataset_name Salesforce/wikitext --dataset_config wikitext-2-v1 --output_dir outputs/wikitext2

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
)
from transformers.hf_argparser import HfArg

from luna_mega import training as lib


@dataclass
class DataArguments(lib.StreamArguments):
    train_files: list[str] | None = HfArg(default=None, help="local training files instead of a folder")
    validation_files: list[str] | None = HfArg(default=None, help="local files of the validation split")
    text_column: str = HfArg(default="text", help="column with the text; a txt file has one text per line")
    max_seq_length: int = HfArg(default=512, help="tokens of an input, including <s>")
    short_seq_prob: float = HfArg(default=0.0, help="share of the training inputs with a random shorter length")
    mlm_probability: float = HfArg(default=0.15, help="share of the tokens to predict")
    max_train_samples: int | None = HfArg(default=None, help="maximum number of texts")
    max_eval_samples: int | None = HfArg(default=None, help="maximum number of texts")
    preprocessing_num_workers: int | None = HfArg(default=None, help="number of processes for tokenization")


class Masking:
    """Function that masks tokens of a block with a given random generator.

    It returns an `attention_mask` of ones, because a random replacement can be the padding token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float):
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)

    def __call__(self, block: dict[str, Any], numbers: torch.Generator) -> dict[str, torch.Tensor]:
        self.collator.generator = numbers
        input_ids, labels = self.collator.torch_mask_tokens(torch.tensor([block["input_ids"]]))
        return {"input_ids": input_ids[0], "attention_mask": torch.ones_like(input_ids[0]), "labels": labels[0]}


def cut_blocks(
    split: Dataset | IterableDataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    short: float = 0.0,
) -> Dataset | IterableDataset:
    """Cut the texts, each followed by `</s>`, into blocks of `<s>` and `max_seq_length - 1` tokens.

    Empty texts are skipped. Each batch of 1,000 texts is concatenated; a remainder shorter than a block is dropped. A
    share `short` of the blocks has a random number of 1 to `max_seq_length - 1` tokens, seeded by the text.
    """
    bos, eos = lib.boundary_ids(tokenizer)
    step = data.max_seq_length - 1

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text.strip() for text in batch[data.text_column] if text.strip()]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        stream = list(chain.from_iterable([*ids, eos] for ids in encoded))
        most = len(stream) // (1 if short else step)
        numbers = np.random.default_rng([len(stream), *stream[:16]])
        lengths = np.where(numbers.random(most) < short, numbers.integers(step, size=most) + 1, step)
        ends = lengths.cumsum()
        spans = zip(ends - lengths, ends[ends <= len(stream)], strict=False)
        return {"input_ids": [[bos, *stream[start:end]] for start, end in spans]}

    if isinstance(split, IterableDataset):
        return split.map(encode, batched=True, remove_columns=list(next(iter(split))))
    options = {"batched": True, "remove_columns": split.column_names, "num_proc": data.preprocessing_num_workers}
    blocks = split.map(encode, **options, desc=name)
    if len(blocks) == 0:
        lib.fail(
            f"split {name} has too little text for one block of {data.max_seq_length} tokens; reduce --max_seq_length"
        )
    return blocks


def mask_once(blocks: Dataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments, seed: int) -> Dataset:
    """Mask the validation blocks in advance, so that all evaluations use the same masks."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=data.mlm_probability)
    collator.generator = torch.Generator().manual_seed(seed)

    def mask(batch: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        return dict(collator([{"input_ids": ids} for ids in batch["input_ids"]]))

    return blocks.map(mask, batched=True, keep_in_memory=True, load_from_cache_file=False, desc="masking")


def token_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each masked token, and whether the prediction is correct, `[B, T, 2]`."""
    masked = labels != -100
    logits = logits if logits.ndim == 2 else logits[masked]  # some models only return those of masked tokens
    logits, targets = logits.float(), labels[masked]
    scores = logits.new_zeros(*labels.shape, 2)
    loss = cross_entropy(logits, targets, reduction="none")
    scores[masked] = torch.stack([loss, logits.argmax(-1) == targets], dim=-1)
    return scores


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return perplexity and accuracy over the masked tokens."""
    loss, right = prediction.predictions[prediction.label_ids != -100].mean(axis=0, dtype=np.float64)
    return {"perplexity": float(np.exp(loss)), "accuracy": float(right)}


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, TrainingArguments)
    data, model, training = lib.parse_arguments(kinds, argv)
    run = lib.Run(data, model, training, predicts=False)
    if sum(map(bool, (data.dataset_name, data.dataset_path, data.train_files or data.validation_files))) != 1:
        lib.fail("pass one of --dataset_name, --dataset_path, or --train_files and --validation_files")
    if not 0 < data.mlm_probability < 1:
        lib.fail(f"--mlm_probability {data.mlm_probability} must be between 0 and 1")
    if not 0 <= data.short_seq_prob <= 1:
        lib.fail(f"--short_seq_prob {data.short_seq_prob} must be between 0 and 1")
    lib.check_least(data, 2, "max_seq_length")
    return data, model, training, run


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Any], PreTrainedTokenizerBase, PreTrainedConfig]:
    """Return the splits as masked blocks, the tokenizer, and the configuration of the model."""
    limits, files = lib.choose_splits(training, data), None
    if not (data.dataset_name or data.dataset_path):
        files = {name: getattr(data, f"{name}_files") for name in limits}
        if missing := [name for name in limits if not files[name]]:
            lib.fail(f"pass --{missing[0]}_files as well")
    splits = lib.load_splits(limits, data, [data.text_column], files=files, streaming=data.streaming)
    texts = lib.streams.some_texts(splits["train"], data.text_column) if "train" in splits else ()
    tokenizer = lib.make_tokenizer(model, texts, data.max_seq_length)
    if tokenizer.mask_token_id is None:
        lib.fail("the tokenizer has no mask_token, which masked language models require; pass another --tokenizer_name")
    shorten = (data, "max_seq_length")
    config = lib.make_config(model, tokenizer, data.max_seq_length, shorten=shorten, sparse_prediction=True)
    short = {"train": data.short_seq_prob}
    blocks = {name: cut_blocks(split, name, tokenizer, data, short.get(name, 0.0)) for name, split in splits.items()}
    if "validation" in blocks:
        blocks["validation"] = mask_once(blocks["validation"], tokenizer, data, training.seed)
    masking = Masking(tokenizer, data.mlm_probability)
    if data.streaming and "train" in blocks:
        blocks["train"] = lib.streams.Stream(blocks["train"], masking, training, data.shuffle_buffer, "max_seq_length")
    elif "train" in blocks:
        blocks["train"] = lib.Redrawn(blocks["train"], masking, training.seed)
    return blocks, tokenizer, config


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)

    with run.reading():
        blocks, tokenizer, config = load_data(data, model, training)

    trainer = lib.OrderedTrainer(
        lib.make_model(AutoModelForMaskedLM, model, config),
        training,
        train_dataset=blocks.get("train"),
        eval_dataset=blocks.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer) if data.short_seq_prob else default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=token_scores,
    )

    return run.fit(trainer)


if __name__ == "__main__":
    main()
