"""Trains a causal language model, from scratch or from a checkpoint, on plain text as one stream of tokens.

    python examples/run_clm.py --recipe examples/recipes/clm/shakespeare_mega_chunk.yaml --dataset_path DIR \
        --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from common.arguments import fail, find_checkpoint, parse_arguments
from common.data import check_split, load_splits, name_data
from common.hub import publish
from common.language_model import Score, Streams, Windows, encode, score
from common.model import ModelArguments, make_config, make_model, make_tokenizer
from common.training import check_training, describe, evaluate, finish, train
from common.vocabulary import make_bytes, train_characters, train_words
from datasets import Dataset
from torch.utils.data import SequentialSampler, default_collate
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

# The fields that make a decoder.
DECODER = {"mega": {"is_decoder": True, "bidirectional": False}, "luna": {"is_decoder": True}}


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name: Salesforce/wikitext"})
    dataset_config: str | None = field(default=None, metadata={"help": "its configuration: wikitext-103-v1"})
    dataset_path: str | None = field(default=None, metadata={"help": "local folder: files named by split"})
    text_column: str = field(default="text", metadata={"help": "column with the text; a txt file has one row a line"})
    validation_share: float = field(
        default=0.0, metadata={"help": "the last part of the training tokens is the validation split: 0.1"}
    )
    tokenization: str = field(
        default="bpe", metadata={"help": "tokenizer made without --tokenizer_name: char, byte, bpe or word"}
    )
    line_end: str = field(default="eos", metadata={"help": "what follows a row of text: newline, or eos (</s>)"})
    block_size: int = field(default=512, metadata={"help": "tokens of a training block; with chunks, whole chunks"})
    min_block_size: int | None = field(
        default=None, metadata={"help": "blocks of a random number of chunks, from this to block_size tokens"}
    )
    carry_state: bool = field(
        default=False,
        metadata={"help": "train on long streams, a block goes on with the state of the one before (truncated BPTT)"},
    )
    eval_context: int = field(default=8192, metadata={"help": "tokens that evaluation reads before it begins anew"})
    eval_segment: int = field(default=1024, metadata={"help": "of these, tokens at a time"})


class BlockCollator:
    """Stacks blocks; with `shortest` cuts the batch to a random number of chunks, as the original samples lengths."""

    def __init__(self, length: int, shortest: int | None, chunk: int):
        self.length, self.shortest, self.chunk = length, shortest, chunk

    def __call__(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_collate(items)
        if self.shortest is None:
            return batch
        chunks = torch.randint(self.shortest // self.chunk, self.length // self.chunk + 1, ())
        return {name: tensor[:, : int(chunks) * self.chunk] for name, tensor in batch.items()}


class LanguageModelTrainer(Trainer):
    """Trainer that carries the state along streams, where it is given `Streams`, and scores one stream of tokens."""

    def __init__(self, *args, data: DataArguments, **kwargs):
        super().__init__(*args, **kwargs)
        self.data, self.past = data, None

    def _get_train_sampler(self, *args):
        if isinstance(self.train_dataset, Streams):
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(*args)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if "step" not in inputs:
            return super().compute_loss(model, inputs | {"use_cache": False}, *args, **kwargs)
        if inputs.pop("step")[0] == 0:
            self.past = None
        if self.past is not None:
            self.past.detach()
        kwargs.pop("return_outputs", None)
        loss, outputs = super().compute_loss(
            model, inputs | {"past_key_values": self.past, "use_cache": True}, *args, return_outputs=True, **kwargs
        )
        self.past = outputs["past_key_values"]
        return loss

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        stream = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.args.eval_batch_size
        metrics = report(score(self.model, stream, self.data.eval_context, self.data.eval_segment, rows))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def report(result: Score) -> dict[str, float]:
    """Nats, perplexity and bits per token."""
    return {"loss": result.loss, "perplexity": result.perplexity, "bits_per_token": result.bits}


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments]:
    kinds = (DataArguments, ModelArguments, TrainingArguments)
    data, model, training = parse_arguments(kinds, argv, model_type="mega")
    check_training(training, model)
    if training.do_predict:
        fail("--do_predict: a language model has no test predictions to write; pass --do_eval")
    if (data.dataset_name is None) == (data.dataset_path is None):
        fail("pass one of --dataset_name and --dataset_path")
    for name, choices in (("tokenization", ("char", "byte", "bpe", "word")), ("line_end", ("newline", "eos"))):
        if getattr(data, name) not in choices:
            fail(f"--{name} {getattr(data, name)} must be one of {', '.join(choices)}")
    if not 0 <= data.validation_share < 1:
        fail(f"--validation_share {data.validation_share} must be in [0, 1)")
    for name in ("block_size", "eval_context", "eval_segment"):
        if getattr(data, name) < 1:
            fail(f"--{name} {getattr(data, name)} must be at least 1")
    if model.model_type not in DECODER:
        fail(f"--model_type {model.model_type} must be one of {', '.join(DECODER)}")
    if data.carry_state and data.min_block_size:
        fail("--min_block_size goes with blocks at random places, not with --carry_state")
    if data.carry_state and (training.gradient_checkpointing or training.n_gpu > 1 or training.world_size > 1):
        fail("--carry_state needs a single process and no --gradient_checkpointing")
    return data, model, training


def load(data: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    names = ["train"] if training.do_train or data.validation_share else []
    names += ["validation"] if training.do_eval and not data.validation_share else []
    splits = load_splits(names, data.dataset_path, data.dataset_name, data.dataset_config)
    for name, split in splits.items():
        check_split(split, name, (data.text_column,), labels=None)
    return splits


def tokenizer_of(data: DataArguments, model: ModelArguments, texts: list[str]) -> PreTrainedTokenizerBase:
    if model.tokenizer_name or model.model_name_or_path or data.tokenization == "bpe":
        return make_tokenizer(model, texts, max_length=int(1e30))
    if data.tokenization == "byte":
        return make_bytes()
    if data.tokenization == "word":
        return train_words(texts, model.vocab_size)
    return train_characters([*texts, "\n"])


def build_trainer(data: DataArguments, model: ModelArguments, training: TrainingArguments) -> Trainer:
    splits = load(data, training)
    texts = splits["train"][data.text_column] if "train" in splits else []
    tokenizer = tokenizer_of(data, model, texts)
    streams = {name: encode(split, data.text_column, tokenizer, data.line_end) for name, split in splits.items()}
    if data.validation_share:
        cut = math.ceil(len(streams["train"]) * (1 - data.validation_share))
        streams["train"], streams["validation"] = streams["train"][:cut], streams["train"][cut:]
    config = make_config(model, tokenizer, data.block_size, **DECODER[model.model_type])
    chunk = getattr(config, "attention_chunk", None) or 1
    if data.min_block_size and (data.min_block_size % chunk or data.block_size % chunk):
        fail(
            f"--min_block_size {data.min_block_size} and --block_size {data.block_size} must be whole chunks of {chunk}"
        )
    train_set = None
    if training.do_train and data.carry_state:
        train_set = Streams(streams["train"], data.block_size, training.train_batch_size)
    elif training.do_train:
        train_set = Windows(streams["train"], data.block_size)
    return LanguageModelTrainer(
        model=make_model(AutoModelForCausalLM, model, config),
        args=training,
        data=data,
        train_dataset=train_set,
        eval_dataset=streams.get("validation") if training.do_eval else None,
        processing_class=tokenizer,
        data_collator=BlockCollator(data.block_size, data.min_block_size, chunk),
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    data, model, training = parse(argv)
    base_model, checkpoint = model.model_name_or_path, find_checkpoint(training)
    if checkpoint:  # for its configuration and tokenizer, also when the run began from scratch
        model.model_name_or_path = checkpoint
    set_seed(training.seed)
    training.remove_unused_columns = False
    trainer = build_trainer(data, model, training)
    summary = describe(trainer, model)
    if training.do_train:
        summary |= train(trainer, checkpoint)
    if training.do_eval:
        summary |= evaluate(trainer)
    summary = finish(trainer, "causal language model", summary, ["eval_loss"], start)
    if training.do_train:
        hub = {"dataset": data.dataset_name, "dataset_config": data.dataset_config}
        source = {"dataset": name_data([data.dataset_path])} if data.dataset_path else hub
        publish(trainer, __file__, argv, summary, **source, base_model=base_model, license=model.license)
    return summary


if __name__ == "__main__":
    main()
