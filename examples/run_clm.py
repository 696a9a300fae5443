"""Trains a causal language model, from scratch or from a checkpoint, on plain text as one stream of tokens.

    python examples/run_clm.py --recipe examples/recipes/clm/shakespeare_mega_chunk.yaml --dataset_path DIR \
        --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from common.arguments import check_choice, check_least, fail
from common.data import SourceArguments, check_source, check_stream, check_texts, load_splits, some_texts
from common.language_model import Score, Streams, Windows, cut_stream, encode, score
from common.model import make_config, make_model, make_tokenizer
from common.scale import Stream, total
from common.script import Script
from common.training import OrderedTrainer
from common.vocabulary import make_bytes, train_characters, train_words
from datasets import IterableDataset
from torch.utils.data import SequentialSampler, default_collate
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer

# The fields that make a decoder.
DECODER = {"mega": {"is_decoder": True, "bidirectional": False}, "luna": {"is_decoder": True}}


@dataclass
class DataArguments(SourceArguments):
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
    """Collator that stacks blocks and, with `shortest`, cuts them to a random number of chunks as the original does."""

    def __init__(self, length: int, shortest: int | None, chunk: int):
        self.length, self.shortest, self.chunk = length, shortest, chunk

    def __call__(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_collate(items)
        if self.shortest is None:
            return batch
        chunks = torch.randint(self.shortest // self.chunk, self.length // self.chunk + 1, ())
        return {name: tensor[:, : int(chunks) * self.chunk] for name, tensor in batch.items()}


class LanguageModelTrainer(OrderedTrainer):
    """Trainer that carries the state along `Streams` and scores one stream of tokens."""

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
        data, args = self.data, self.args
        ranks = (args.process_index, args.world_size)
        with self.averaged():
            result = score(self.model, stream, data.eval_context, data.eval_segment, args.eval_batch_size, ranks=ranks)
        result = Score(*total([result.total, result.tokens], args))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in result.metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class CausalLanguageModel(Script):
    data_arguments = DataArguments
    defaults = {"model_type": "mega"}
    title, metric, streams = "causal language model", "eval_loss", True

    def check(self) -> None:
        super().check()
        data, training = self.data, self.training
        check_source(data)
        check_choice(data, "tokenization", ("char", "byte", "bpe", "word"))
        check_choice(data, "line_end", ("newline", "eos"))
        check_choice(self.model, "model_type", DECODER)
        check_least(data, 1, "block_size", "eval_context", "eval_segment")
        if not 0 <= data.validation_share < 1:
            fail(f"--validation_share {data.validation_share} must be in [0, 1)")
        if data.carry_state and data.min_block_size:
            fail("--min_block_size goes with blocks at random places, not with --carry_state")
        if self.scale.streaming and (data.carry_state or data.validation_share):
            fail("--streaming: not with --carry_state or --validation_share, which need the whole text")
        if data.carry_state and (training.gradient_checkpointing or training.n_gpu > 1 or training.world_size > 1):
            fail("--carry_state needs a single process and no --gradient_checkpointing")

    def make_tokenizer(self, texts: list[str]) -> PreTrainedTokenizerBase:
        if self.model.tokenizer_name or self.model.model_name_or_path or self.data.tokenization == "bpe":
            return make_tokenizer(self.model, texts, max_length=int(1e30))
        if self.data.tokenization == "byte":
            return make_bytes()
        if self.data.tokenization == "word":
            return train_words(texts, self.model.vocab_size)
        return train_characters([*texts, "\n"])

    def load(self) -> dict[str, torch.LongTensor | IterableDataset]:
        """Make the tokenizer; return the splits as streams of tokens, those that are streamed as they are."""
        data, limits = self.data, self.limits()
        if data.validation_share:
            limits = {"train": None}
        source = (data.dataset_path, data.dataset_name, data.dataset_config)
        splits = load_splits(limits, *source, streaming=self.scale.streaming)
        for name, split in splits.items():
            if isinstance(split, IterableDataset):
                check_stream(split, name, data.text_column)
            else:
                check_texts(split, name, (data.text_column,))
        texts = some_texts(splits["train"], data.text_column) if "train" in splits else []
        self.tokenizer = self.make_tokenizer(texts)
        streams = {
            name: split
            if isinstance(split, IterableDataset)
            else encode(split[data.text_column], self.tokenizer, data.line_end)
            for name, split in splits.items()
        }
        if data.validation_share:
            cut = math.ceil(len(streams["train"]) * (1 - data.validation_share))
            streams["train"], streams["validation"] = streams["train"][:cut], streams["train"][cut:]
        return streams

    def prepare(self) -> None:
        data, training, streams = self.data, self.training, self.load()
        training.remove_unused_columns = False
        self.config = make_config(self.model, self.tokenizer, data.block_size, **DECODER[self.model.model_type])
        shortest, length = data.min_block_size, data.block_size
        chunk = getattr(self.config, "attention_chunk", None) or 1
        if shortest and (shortest % chunk or length % chunk):
            fail(f"--min_block_size {shortest} and --block_size {length} must be whole chunks of {chunk}")
        self.collator = BlockCollator(length, shortest, chunk)
        if "validation" in streams:
            self.splits["validation"] = streams["validation"]
        if training.do_train and self.scale.streaming:
            blocks = cut_stream(streams["train"], data.text_column, self.tokenizer, data.line_end, length)
            blocks = blocks.shuffle(training.seed, buffer_size=self.scale.shuffle_buffer)
            self.splits["train"] = Stream(blocks, lambda block, _: block, training)
        elif training.do_train and data.carry_state:
            self.splits["train"] = Streams(streams["train"], length, training.train_batch_size)
        elif training.do_train:
            self.splits["train"] = Windows(streams["train"], length, training.seed)

    def build(self) -> Trainer:
        return self.make_trainer(
            make_model(AutoModelForCausalLM, self.model, self.config),
            LanguageModelTrainer,
            data=self.data,
            processing_class=self.tokenizer,
            data_collator=self.collator,
        )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return CausalLanguageModel(argv).run()


if __name__ == "__main__":
    main()
