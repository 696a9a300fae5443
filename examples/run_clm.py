r"""Train a causal language model, from scratch or from a checkpoint, on plain text as one stream of tokens.

    python examples/run_clm.py --recipe examples/recipes/clm/shakespeare_mega_chunk.yaml \
        --dataset_path data/shakespeare --output_dir outputs/shakespeare

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import SequentialSampler, default_collate
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from luna_mega import training as lib

# Fields of Luna and Mega, which can also be encoders.
DECODER = {"is_decoder": True, "bidirectional": False}
# Options whose defaults are the settings of the model.
SETTINGS = ("line_end", "text_column", "eval_context", "eval_segment", "tokenization")
# Models with a recurrent state that can be detached.
RECURRENT = ("luna", "mega", "megalodon")


@dataclass
class DataArguments(lib.StreamArguments):
    text_column: str | None = HfArg(default=None, help="column with the text; default: the model's, or text")
    validation_share: float = HfArg(default=0.0, help="last share of the training tokens, for validation: 0.1")
    tokenization: str | None = HfArg(default=None, help="new tokenizer: char, byte, bpe or word; default: bpe")
    line_end: str | None = HfArg(default=None, help="separator: newline, or eos (</s>); default: the model's, or eos")
    block_size: int = HfArg(default=512, help="tokens of a training block; a multiple of the chunk size, if any")
    min_block_size: int | None = HfArg(default=None, help="truncate blocks at random, to at least N tokens")
    max_tokens: int | None = HfArg(
        default=None, help="maximum tokens of a training batch on each device, instead of a number of blocks"
    )
    carry_state: bool = HfArg(default=False, help="carry the recurrent state from block to block (truncated BPTT)")
    eval_context: int | None = HfArg(default=None, help="tokens of an evaluation block; default: the model's, or 8192")
    eval_segment: int | None = HfArg(default=None, help="tokens of an evaluation step; default: the model's, or 1024")


class LanguageModelTrainer(lib.OrderedTrainer):
    """Trainer that carries the recurrent state along `Streams`, and evaluates one stream of tokens."""

    def __init__(self, *args, data: DataArguments, **kwargs):
        self.data, self.past, self.max_tokens = data, None, data.max_tokens
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, *args):
        if isinstance(self.train_dataset, lib.language_modeling.Streams):
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(*args)

    def compute_loss(self, model, inputs, *args, **kwargs):
        # transformers' models compute no loss without labels; with label smoothing, Trainer shifts them itself
        inputs["labels"] = inputs["shift_labels"] if self.label_smoother is None else inputs["input_ids"]
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])  # no padding, as in `score_stream`
        if "step" not in inputs:
            return super().compute_loss(model, inputs | {"use_cache": False}, *args, **kwargs)
        if inputs.pop("step")[0] == 0:
            self.past = None
        if self.past is not None:
            self.past.detach()
        kwargs.pop("return_outputs", None)
        loss, outputs = super().compute_loss(
            model, inputs | {"cache": self.past, "use_cache": True}, *args, return_outputs=True, **kwargs
        )
        self.past = outputs["cache"]
        return loss

    def run_state(self) -> dict[str, Any]:
        carried = None if self.past is None else lib.language_modeling.pack_cache(self.past)
        return super().run_state() | {"carried": carried}

    def load_run_state(self, state: dict[str, Any]) -> None:
        super().load_run_state(state)
        if (carried := state.get("carried")) is not None:
            self.past = lib.language_modeling.unpack_cache(self.model, carried)
        if (carried is None) == self.data.carry_state:
            found = "no carried state" if carried is None else "a carried state"
            lib.fail(f"--carry_state {self.data.carry_state}: the checkpoint has {found}; resume with its options")

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        stream = self.eval_dataset if eval_dataset is None else eval_dataset
        lengths = (self.data.eval_context, self.data.eval_segment, self.args.eval_batch_size)
        scores = lib.language_modeling.score_stream(self.model, stream, *lengths, training=self.args)
        return self.report(scores, metric_key_prefix)


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, TrainingArguments)
    data, model, training = lib.parse_arguments(kinds, argv, model_type="mega")
    run = lib.Run(data, model, training, predicts=False)
    if data.tokenization is not None:
        lib.check_choice(data, "tokenization", ("char", "byte", "bpe", "word"))
    if model.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        lib.fail(
            f"--model_type {model.model_type} has no causal language model: luna, mega, megalodon, llama, gpt2, ..."
        )
    lib.check_least(data, 1, "block_size", "min_block_size", "eval_context", "eval_segment")
    if data.line_end is not None:
        lib.check_choice(data, "line_end", ("newline", "eos"))
    if not 0 <= data.validation_share < 1:
        lib.fail(f"--validation_share {data.validation_share} must be in [0, 1)")
    if data.max_tokens is not None:
        lib.check_max_tokens(training)
        if data.max_tokens < data.block_size:
            lib.fail(f"--max_tokens {data.max_tokens} is below --block_size {data.block_size}")
        training.per_device_train_batch_size = data.max_tokens // (data.min_block_size or data.block_size)
    if data.carry_state and data.min_block_size:
        lib.fail("--min_block_size is not supported with --carry_state; remove one of them")
    if data.streaming and (data.carry_state or data.validation_share):
        lib.fail("--streaming is not supported with --carry_state and --validation_share; remove them")
    if data.carry_state and not model.model_name_or_path and model.model_type not in RECURRENT:
        lib.fail(f"--carry_state requires a recurrent state: --model_type {' or '.join(RECURRENT)}")
    if data.carry_state and training.auto_find_batch_size:
        lib.fail(
            "--auto_find_batch_size is not supported with --carry_state, whose batches continue; remove one of them"
        )
    if data.carry_state and (training.gradient_checkpointing or training.n_gpu > 1 or training.world_size > 1):
        lib.fail("--carry_state requires a single process and no --gradient_checkpointing")
    return data, model, training, run


def choose_tokenizer(data: DataArguments, model: lib.ModelArguments, texts: list[str]) -> PreTrainedTokenizerBase:
    """Train a tokenizer of characters, bytes, words or a BPE."""
    if data.tokenization == "byte":
        return lib.tokenizers.make_bytes()
    if data.tokenization == "word":
        return lib.tokenizers.train_words(texts, model.vocab_size)
    if data.tokenization == "char":
        return lib.tokenizers.train_characters([*texts, "\n"])
    return lib.make_tokenizer(model, texts, max_length=int(1e30))


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: TrainingArguments
) -> tuple[dict[str, torch.LongTensor | IterableDataset], PreTrainedTokenizerBase]:
    """Return the splits as streams of tokens, or as texts with `--streaming`, and the tokenizer."""
    saved = model.tokenizer_name or model.model_name_or_path
    tokenizer = lib.make_tokenizer(model, (), max_length=int(1e30)) if saved else None
    lib.language_modeling.apply_settings(data, tokenizer, *SETTINGS)
    limits = {"train": None} if data.validation_share else lib.choose_splits(training, data)
    splits = lib.load_splits(limits, data, [data.text_column], streaming=data.streaming)
    if tokenizer is None:
        texts = lib.streams.some_texts(splits["train"], data.text_column) if "train" in splits else []
        tokenizer = choose_tokenizer(data, model, texts)
    for name, split in splits.items():
        if not isinstance(split, IterableDataset):
            splits[name] = lib.language_modeling.encode(split[data.text_column], tokenizer, data.line_end)
    if data.validation_share:
        splits["train"], splits["validation"] = lib.language_modeling.held_out(splits["train"], data.validation_share)
    return splits, tokenizer


def draw_length(data: DataArguments, config: PreTrainedConfig) -> lib.streams.Change | None:
    """Return a function that adds a random number of chunks to a block, in tokens; None without `--min_block_size`.

    Exit if block sizes are not multiples of the chunk size. The original code also draws the length of each batch.
    """
    shortest, length = data.min_block_size, data.block_size
    chunk = getattr(config, "attention_chunk", None) or 1
    if not shortest:
        return None
    if shortest % chunk or length % chunk or shortest > length:
        lib.fail(
            f"--min_block_size {shortest} and --block_size {length} must be multiples of the chunk size {chunk}, and "
            "the former must not be larger"
        )

    def draw(block: lib.streams.Example, numbers: torch.Generator) -> lib.streams.Example:
        chunks = torch.randint(shortest // chunk, length // chunk + 1, (), generator=numbers)
        return block | {"length": chunks * chunk}

    return draw


def cut_training(
    stream: torch.LongTensor | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    config: PreTrainedConfig,
    training: TrainingArguments,
) -> lib.streams.Stream | lib.language_modeling.Streams | lib.Redrawn:
    """Cut the training stream into blocks: streamed, consecutive, or at random positions."""
    lengths = draw_length(data, config)
    if data.streaming:
        blocks = lib.language_modeling.cut_stream(stream, data.text_column, tokenizer, data.line_end, data.block_size)
        return lib.streams.Stream(blocks, lengths, training, data.shuffle_buffer, "block_size")
    if data.carry_state:
        streams = lib.language_modeling.Streams(stream, data.block_size, training.train_batch_size)
        check_carried(config, streams.part)
        return streams
    return lib.language_modeling.draw_windows(stream, data.block_size, training.seed, lengths)


def check_carried(config: PreTrainedConfig, length: int) -> None:
    """Exit if the model cannot continue with its recurrent state for `length` tokens."""
    if config.model_type not in RECURRENT:
        lib.fail(f"--carry_state requires a recurrent state: --model_type {' or '.join(RECURRENT)}")
    if getattr(config, "layerdrop", 0.0):
        lib.fail(f"--carry_state requires all layers, but layerdrop={config.layerdrop} skips some; pass layerdrop=0.0")
    if length > (positions := lib.longest_input(config)):
        advice = {"luna": "position_embedding_type=sinusoidal", "mega": "relative_positional_bias=rotary"}
        lib.fail(
            f"--carry_state reads {length} consecutive tokens, but the model has {positions} positions; pass "
            f"--config_overrides {advice[config.model_type]}"
        )


def make_collator(max_tokens: int | None) -> Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Return a collator that truncates blocks to the random length of the first, if any, and omits excess blocks."""

    def collate(blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_collate(blocks)
        lengths = batch.pop("length", None)
        if lengths is None:
            return batch
        length, count = lengths[0], max_tokens and max_tokens // lengths[0]
        return {name: tensor[:count, :length] for name, tensor in batch.items()}

    return collate


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    training.remove_unused_columns = False

    with run.reading():
        streams, tokenizer = load_data(data, model, training)
        shorten = (data, "block_size", "eval_context")
        config = lib.make_config(model, tokenizer, data.block_size, shorten=shorten, **DECODER)
        lib.language_modeling.store_settings(tokenizer, data)
        blocks = cut_training(streams["train"], tokenizer, data, config, training) if training.do_train else None

    trainer = LanguageModelTrainer(
        lib.make_model(AutoModelForCausalLM, model, config),
        training,
        data=data,
        train_dataset=blocks,
        eval_dataset=streams.get("validation"),
        processing_class=tokenizer,
        data_collator=make_collator(data.max_tokens and data.max_tokens * max(1, training.n_gpu)),
    )

    return run.fit(trainer)


if __name__ == "__main__":
    main()
