r"""Train a causal language model, from scratch or from a checkpoint, on plain text as one stream of tokens.

    python examples/run_clm.py --recipe examples/recipes/clm/shakespeare_mega_chunk.yaml \
        --dataset_path data/shakespeare --output_dir outputs/shakespeare

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from datasets import IterableDataset
from torch.utils.data import SequentialSampler, default_collate
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from luna_mega import training as lib

# Fields of Luna and Mega, which can also be encoders.
DECODER = {"is_decoder": True, "bidirectional": False}
# Models with a recurrent state that can be detached.
RECURRENT = ("luna", "mega", "megalodon")


@dataclass
class DataArguments(lib.StreamArguments):
    text_column: str = HfArg(default="text", help="column with the text; a txt file has one text per line")
    validation_share: float = HfArg(default=0.0, help="last share of the training tokens, for validation: 0.1")
    tokenization: str = HfArg(default="bpe", help="tokenizer without --tokenizer_name: char, byte, bpe or word")
    line_end: str = HfArg(default="eos", help="separator of the texts: newline, or eos (</s>)")
    block_size: int = HfArg(default=512, help="tokens of a training block; a multiple of the chunk size, if any")
    min_block_size: int | None = HfArg(default=None, help="truncate blocks at random, to at least N tokens")
    carry_state: bool = HfArg(default=False, help="carry the recurrent state from block to block (truncated BPTT)")
    eval_context: int = HfArg(default=8192, help="tokens of an evaluation block, which starts with an empty cache")
    eval_segment: int = HfArg(default=1024, help="tokens of a forward pass in evaluation")


class LanguageModelTrainer(lib.OrderedTrainer):
    """Trainer that carries the recurrent state along `Streams`, and evaluates one stream of tokens."""

    def __init__(self, *args, data: DataArguments, **kwargs):
        super().__init__(*args, **kwargs)
        self.data, self.past = data, None

    def _get_train_sampler(self, *args):
        if isinstance(self.train_dataset, lib.language_modeling.Streams):
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(*args)

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["labels"] = inputs["shift_labels"]  # transformers' models compute no loss without labels
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

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        stream = self.eval_dataset if eval_dataset is None else eval_dataset
        lengths = (self.data.eval_context, self.data.eval_segment, self.args.eval_batch_size)
        scores = lib.language_modeling.score_stream(self.model, stream, *lengths, training=self.args)
        return self.report(scores, metric_key_prefix)


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, TrainingArguments)
    data, model, training = lib.parse_arguments(kinds, argv, model_type="mega")
    run = lib.Run(data, model, training, predicts=False)
    lib.check_choice(data, "tokenization", ("char", "byte", "bpe", "word"))
    lib.check_choice(data, "line_end", ("newline", "eos"))
    if model.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        lib.fail(
            f"--model_type {model.model_type} has no causal language model: luna, mega, megalodon, llama, gpt2, ..."
        )
    lib.check_least(data, 1, "block_size", "eval_context", "eval_segment")
    if not 0 <= data.validation_share < 1:
        lib.fail(f"--validation_share {data.validation_share} must be in [0, 1)")
    if data.carry_state and data.min_block_size:
        lib.fail("--min_block_size is not supported with --carry_state; remove one of them")
    if data.streaming and (data.carry_state or data.validation_share):
        lib.fail("--streaming is not supported with --carry_state and --validation_share; remove them")
    if data.carry_state and model.model_type not in RECURRENT:
        lib.fail(f"--carry_state requires a recurrent state: --model_type {' or '.join(RECURRENT)}")
    if data.carry_state and (training.gradient_checkpointing or training.n_gpu > 1 or training.world_size > 1):
        lib.fail("--carry_state requires a single process and no --gradient_checkpointing")
    return data, model, training, run


def choose_tokenizer(data: DataArguments, model: lib.ModelArguments, texts: list[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or train one of characters, bytes, words or a BPE."""
    if model.tokenizer_name or model.model_name_or_path or data.tokenization == "bpe":
        return lib.make_tokenizer(model, texts, max_length=int(1e30))
    if data.tokenization == "byte":
        return lib.tokenizers.make_bytes()
    if data.tokenization == "word":
        return lib.tokenizers.train_words(texts, model.vocab_size)
    return lib.tokenizers.train_characters([*texts, "\n"])


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: TrainingArguments
) -> tuple[dict[str, torch.LongTensor | IterableDataset], PreTrainedTokenizerBase]:
    """Return the splits as streams of tokens, or as texts with `--streaming`, and the tokenizer."""
    limits = {"train": None} if data.validation_share else lib.choose_splits(training, data)
    splits = lib.load_splits(limits, data, [data.text_column], streaming=data.streaming)
    texts = lib.streams.some_texts(splits["train"], data.text_column) if "train" in splits else []
    tokenizer = choose_tokenizer(data, model, texts)
    for name, split in splits.items():
        if not isinstance(split, IterableDataset):
            splits[name] = lib.language_modeling.encode(split[data.text_column], tokenizer, data.line_end)
    if data.validation_share:
        cut = math.ceil(len(splits["train"]) * (1 - data.validation_share))
        splits["train"], splits["validation"] = splits["train"][:cut], splits["train"][cut:]
    return splits, tokenizer


def cut_training(
    stream: torch.LongTensor | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    training: TrainingArguments,
) -> lib.streams.Stream | lib.language_modeling.Streams | lib.Redrawn:
    """Cut the training stream into blocks: streamed, consecutive, or at random positions."""
    if data.streaming:
        blocks = lib.language_modeling.cut_stream(stream, data.text_column, tokenizer, data.line_end, data.block_size)
        return lib.streams.Stream(blocks, None, training, data.shuffle_buffer)
    if data.carry_state:
        return lib.language_modeling.Streams(stream, data.block_size, training.train_batch_size)
    return lib.language_modeling.draw_windows(stream, data.block_size, training.seed)


def make_collator(data: DataArguments, config: PreTrainedConfig) -> Callable:
    """Return the collator; exit if block sizes are not multiples of the chunk size.

    With `--min_block_size`, it truncates blocks to a random number of chunks, as the original code does.
    """
    shortest, length = data.min_block_size, data.block_size
    chunk = getattr(config, "attention_chunk", None) or 1
    if shortest and (shortest % chunk or length % chunk):
        lib.fail(f"--min_block_size {shortest} and --block_size {length} must be multiples of the chunk size {chunk}")

    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        most = int(torch.randint(shortest // chunk, length // chunk + 1, ())) * chunk
        return {name: tensor[:, :most] for name, tensor in default_collate(items).items()}

    return collate if shortest else default_collate


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    training.remove_unused_columns = False

    with run.reading():
        streams, tokenizer = load_data(data, model, training)
        config = lib.make_config(model, tokenizer, data.block_size, **DECODER)
        collator = make_collator(data, config)
        blocks = cut_training(streams["train"], tokenizer, data, training) if training.do_train else None

    trainer = LanguageModelTrainer(
        lib.make_model(AutoModelForCausalLM, model, config),
        training,
        data=data,
        train_dataset=blocks,
        eval_dataset=streams.get("validation"),
        processing_class=tokenizer,
        data_collator=collator,
    )

    return run.fit(trainer)


if __name__ == "__main__":
    main()
