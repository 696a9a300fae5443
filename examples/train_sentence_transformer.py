r"""Train a sentence embedding model with sentence-transformers, on pairs or on the vectors of a teacher.

    python examples/train_sentence_transformer.py --model_name_or_path luna-base \
        --dataset_name sentence-transformers/all-nli --dataset_config triplet --text_columns anchor positive negative \
        --sts_name sentence-transformers/stsb --do_train --do_eval --output_dir OUT

The loss is MultipleNegativesRankingLoss or, with `--teacher`, EmbedDistillLoss: 1 - the cosine to the vectors of the
teacher. The evaluation computes the loss (`--validation_split`) and compares cosine similarities with a dataset of
scored pairs (STS). `SentenceTransformer("OUT")` loads the output folder after `import luna_mega`. All fields of
SentenceTransformerTrainingArguments are options.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import AutoModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.hf_argparser import HfArg

from luna_mega import training as lib
from luna_mega.distillation.embeddings import RandomRows, cut_texts, teacher_vectors
from luna_mega.distillation.sentences import read_modules

try:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss, MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
except ImportError:
    lib.fail("sentence-transformers is not installed; run pip install 'sentence-transformers>=6'")
POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens")


@dataclass
class DataArguments(lib.SourceArguments, lib.LimitArguments):
    text_columns: list[str] = HfArg(
        default_factory=lambda: ["sentence1", "sentence2"],
        help="columns of anchor, positive and, optionally, negative sentences; with --teacher, one column",
    )
    validation_split: str | None = HfArg(default=None, help="split on which the evaluation computes the loss")
    score_column: str | None = HfArg(default=None, help="column with the score of a training pair, for --min_score")
    min_score: float = HfArg(default=0.0, help="minimum score of a training pair")
    sts_name: str | None = HfArg(default=None, help="dataset of scored pairs on the Hub, for the evaluation")
    sts_path: str | None = HfArg(default=None, help="local folder with the scored pairs")
    sts_split: str = HfArg(default="validation", help="split of the scored pairs")
    sts_columns: list[str] = HfArg(
        default_factory=lambda: ["sentence1", "sentence2", "score"], help="two text columns and the score of the pairs"
    )
    max_seq_length: int = HfArg(default=128, help="maximum length; longer sentences are truncated")
    pooling: str | None = HfArg(default=None, help=f"{', '.join(POOLINGS)}; default: the folder's pooling, or mean")
    scale: float = HfArg(default=20.0, help="factor of the cosine similarities in the loss")
    teacher: str | None = HfArg(default=None, help="sentence-transformers model or encoder: folder or Hub name")
    teacher_window: int | None = HfArg(default=None, help="tokens per averaged window of the teacher (default: limit)")
    projection_lengths: list[int] | None = HfArg(
        default=None,
        help="rows of a converted Luna in the training steps; texts are cut at random lengths from the smallest on",
    )


def parse(
    argv: list[str] | None,
) -> tuple[DataArguments, lib.ModelArguments, SentenceTransformerTrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, SentenceTransformerTrainingArguments)
    # Duplicates in a batch would be false negatives.
    data, model, training = lib.parse_arguments(kinds, argv, batch_sampler="no_duplicates")
    run = lib.Run(data, model, training, predicts=False)
    training.include_num_input_tokens_seen = "no"  # Trainer cannot count the tokens of pairs
    counts, expected = ((1,), "one column with --teacher") if data.teacher else ((2, 3), "two or three columns")
    if (training.do_train or data.validation_split) and len(data.text_columns) not in counts:
        lib.fail(f"--text_columns {' '.join(data.text_columns)} must be {expected}")
    if data.sts_name is not None and data.sts_path is not None:
        lib.fail("pass one of --sts_name and --sts_path")
    if training.do_eval and not (data.validation_split or data.sts_name or data.sts_path):
        lib.fail("evaluation requires --validation_split, --sts_name or --sts_path")
    if not data.teacher and (data.teacher_window or data.projection_lengths):
        lib.fail("--teacher_window and --projection_lengths require --teacher")
    if len(data.sts_columns) != 3:
        lib.fail(f"--sts_columns {' '.join(data.sts_columns)} must be two text columns and the score")
    if data.pooling is not None:
        lib.check_choice(data, "pooling", POOLINGS)
    lib.check_least(data, 2, "max_seq_length")
    lib.check_least(data, 3, "teacher_window")
    lib.check_least(data, 1, "projection_lengths")
    return data, model, training, run


def load_texts(data: DataArguments, training: SentenceTransformerTrainingArguments) -> dict[str, Dataset]:
    """Return the texts, pairs or triplets of training and validation."""
    limits = lib.choose_splits(training, data, (data.validation_split,) if data.validation_split else ())
    if not limits:
        return {}
    splits = lib.load_splits(limits, data, data.text_columns, [data.score_column] if data.score_column else [])
    for name, split in splits.items():
        if data.score_column is not None:
            split = split.filter(lambda row: row[data.score_column] >= data.min_score)
            if len(split) == 0:
                lib.fail(f"split {name}: no row has a {data.score_column} of at least --min_score {data.min_score}")
        splits[name] = split.select_columns(data.text_columns)
    return splits


def make_evaluator(data: DataArguments, batch_size: int) -> EmbeddingSimilarityEvaluator:
    """Return the evaluator, which computes the rank correlation of scores and cosine similarities."""
    first, second, rating = data.sts_columns
    limits, source = {data.sts_split: data.max_eval_samples}, lib.SourceArguments(data.sts_name, None, data.sts_path)
    (split,) = lib.load_splits(limits, source, (first, second), [rating]).values()
    return EmbeddingSimilarityEvaluator(split[first], split[second], split[rating], batch_size=batch_size, name="sts")


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: SentenceTransformerTrainingArguments
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase, EmbeddingSimilarityEvaluator | None]:
    """Return the splits, the tokenizer and the evaluator."""
    splits = load_texts(data, training)
    texts = (text for column in data.text_columns for text in splits["train"][column]) if training.do_train else ()
    tokenizer = lib.make_tokenizer(model, texts, data.max_seq_length)
    scored = training.do_eval and (data.sts_name or data.sts_path)
    return splits, tokenizer, make_evaluator(data, training.per_device_eval_batch_size) if scored else None


def make_embedder(
    data: DataArguments, model: lib.ModelArguments, tokenizer: PreTrainedTokenizerBase, device: str
) -> SentenceTransformer:
    """Return the encoder with the modules of its folder, or with pooling; both are loaded from a folder."""
    config = lib.make_config(model, tokenizer, data.max_seq_length)
    encoder = lib.make_model(AutoModel, model, config)
    with TemporaryDirectory() as folder, lib.one_line(str(model.model_name_or_path)):
        encoder.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if model.model_name_or_path and not data.pooling and (modules := read_modules(model.model_name_or_path)):
            modules.write(Path(folder), data.max_seq_length)
            embedder = SentenceTransformer(folder, device=device)
        else:
            pooling = Pooling(config.hidden_size, data.pooling or "mean")
            embedder = SentenceTransformer(modules=[Transformer(folder), pooling], device=device)
    embedder.max_seq_length = data.max_seq_length
    embedder[0].auto_model.config._name_or_path = ""  # the temporary folder
    return embedder


def load_teacher(data: DataArguments, embedder: SentenceTransformer) -> SentenceTransformer:
    """Load the teacher; set the default of its window."""
    with lib.one_line(f"--teacher {data.teacher}"):
        teacher = SentenceTransformer(lib.find_model(data.teacher), device=str(embedder.device)).eval()
        widths = [model.get_embedding_dimension() for model in (teacher, embedder)]
        if widths[0] != widths[1]:
            raise ValueError(f"vectors of {widths[0]} numbers, but the model has {widths[1]}; use another teacher")
        if not hasattr(teacher[0], "auto_model"):
            raise ValueError("the first module is not a transformer; use another teacher")
    longest = lib.longest_input(teacher[0].auto_model.config)
    data.teacher_window = data.teacher_window or min(teacher.max_seq_length, longest)
    if data.teacher_window > longest:
        lib.fail(f"--teacher_window {data.teacher_window} exceeds the {longest} positions of the teacher")
    return teacher


def add_vectors(
    split: Dataset,
    data: DataArguments,
    training: SentenceTransformerTrainingArguments,
    teacher: SentenceTransformer,
    tokenizer: PreTrainedTokenizerBase,
    shortest: int,
) -> Dataset:
    """Cut texts at random lengths, whose logarithm is uniformly distributed, and add the teacher's vectors."""
    (column,), ratio = data.text_columns, data.max_seq_length / shortest

    def add(rows: dict[str, list], indices: list[int]) -> dict[str, list]:
        lengths = [round(shortest * ratio ** random.Random(f"{training.seed} {index}").random()) for index in indices]
        texts = cut_texts(tokenizer, rows[column], lengths)
        return {column: texts, "label": teacher_vectors(teacher, texts, data.teacher_window).tolist()}

    return split.map(add, batched=True, batch_size=training.eval_batch_size, with_indices=True, desc="teacher")


def distill(
    splits: dict[str, Dataset],
    data: DataArguments,
    training: SentenceTransformerTrainingArguments,
    embedder: SentenceTransformer,
) -> tuple[dict[str, Dataset], EmbedDistillLoss, list[TrainerCallback]]:
    """Return the splits with the vectors of the teacher, the loss, and the callback of `--projection_lengths`."""
    teacher, lengths = load_teacher(data, embedder), data.projection_lengths or []
    with lib.one_line():
        callbacks = [RandomRows(embedder[0].auto_model, lengths)] if lengths else []
    if training.do_train and training.max_steps > 0:  # only the texts of these steps
        rows = training.max_steps * training.gradient_accumulation_steps
        rows *= training.train_batch_size * training.world_size
        train = splits["train"].shuffle(training.seed)
        splits["train"] = train.take(min(rows, len(train)))
    with training.main_process_first(desc="vectors of the teacher"):
        for name, split in splits.items():
            shortest = min([*lengths, data.max_seq_length]) if name == "train" else data.max_seq_length
            splits[name] = add_vectors(split, data, training, teacher, embedder.tokenizer, max(3, shortest))
    return splits, EmbedDistillLoss(embedder, distance_metric="cosine"), callbacks


def set_license(trainer: SentenceTransformerTrainer, base: str | None, license: str | None, source: dict) -> None:
    """Add the license to the model card; sentence-transformers adds the rest."""
    if license:
        trainer.model.model_card_data.set_license(license)


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)

    with run.reading():
        splits, tokenizer, evaluator = load_data(data, model, training)

    embedder = make_embedder(data, model, tokenizer, str(training.device))
    if data.teacher:
        splits, loss, callbacks = distill(splits, data, training, embedder)
    else:
        loss, callbacks = MultipleNegativesRankingLoss(embedder, scale=data.scale), []
    trainer = SentenceTransformerTrainer(
        embedder,
        training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get(data.validation_split),
        loss=loss,
        evaluator=evaluator,
        callbacks=callbacks,
    )

    return run.fit(trainer, describe=set_license)


if __name__ == "__main__":
    main()
