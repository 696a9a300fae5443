r"""Train a sentence embedding model with sentence-transformers.

    python examples/train_sentence_transformer.py --model_name_or_path luna-base \
        --dataset_name sentence-transformers/all-nli --dataset_config triplet --text_columns anchor positive negative \
        --sts_name sentence-transformers/stsb --do_train --do_eval --output_dir OUT

The loss is MultipleNegativesRankingLoss. The evaluation compares cosine similarities with a dataset of scored pairs
(STS). `SentenceTransformer("OUT")` loads the output folder after `import luna_mega`. All fields of
SentenceTransformerTrainingArguments are options.
"""

from dataclasses import dataclass
from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import AutoModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from luna_mega.training.arguments import RunArguments, check_choice, check_least, fail, one_line, parse_arguments
from luna_mega.training.data import LimitArguments, SourceArguments, load_splits
from luna_mega.training.models import ModelArguments, make_config, make_model, make_tokenizer
from luna_mega.training.runs import begin_run, check_run, score, train

try:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
except ImportError:
    fail("sentence-transformers is not installed; run pip install '.[examples,ecosystem]'")

TITLE = "sentence embedding model"
POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens")


@dataclass
class DataArguments(SourceArguments, LimitArguments):
    text_columns: list[str] = HfArg(
        default_factory=lambda: ["sentence1", "sentence2"],
        help="columns of anchor, positive and, optionally, negative sentences",
    )
    score_column: str | None = HfArg(default=None, help="column with the score of a training pair, for --min_score")
    min_score: float = HfArg(default=0.0, help="minimum score of a training pair")
    sts_name: str | None = HfArg(default=None, help="dataset of scored pairs on the Hub, for the evaluation")
    sts_path: str | None = HfArg(default=None, help="local folder with the scored pairs")
    sts_split: str = HfArg(default="validation", help="split of the scored pairs")
    sts_columns: list[str] = HfArg(
        default_factory=lambda: ["sentence1", "sentence2", "score"],
        help="columns of the scored pairs: two text columns and the score",
    )
    max_seq_length: int = HfArg(default=128, help="maximum length; longer sentences are truncated")
    pooling: str = HfArg(default="mean", help=f"pooling of token embeddings: {', '.join(POOLINGS)}")
    scale: float = HfArg(default=20.0, help="factor of the cosine similarities in the loss")


def parse(
    argv: list[str] | None,
) -> tuple[DataArguments, ModelArguments, SentenceTransformerTrainingArguments, RunArguments]:
    """Parse the options; exit if they contradict each other."""
    kinds = (DataArguments, ModelArguments, SentenceTransformerTrainingArguments, RunArguments)
    # Duplicates in a batch would be false negatives.
    data, model, training, run = parse_arguments(kinds, argv, batch_sampler="no_duplicates")
    check_run(TITLE, data, model, training, run, predicts=False)
    training.include_num_input_tokens_seen = "no"  # Trainer cannot count the tokens of pairs
    if training.do_train:
        if len(data.text_columns) not in (2, 3):
            fail(f"--text_columns {' '.join(data.text_columns)} must be two or three columns")
    if training.do_eval and (data.sts_name is None) == (data.sts_path is None):
        fail("evaluation requires one of --sts_name and --sts_path")
    if len(data.sts_columns) != 3:
        fail(f"--sts_columns {' '.join(data.sts_columns)} must be two text columns and the score")
    check_choice(data, "pooling", POOLINGS)
    check_least(data, 2, "max_seq_length")
    return data, model, training, run


def load_pairs(data: DataArguments) -> Dataset:
    """Return the training pairs or triplets."""
    limits, columns = {"train": data.max_train_samples}, data.text_columns
    split = load_splits(limits, data, columns, [data.score_column] if data.score_column else [])["train"]
    if data.score_column is not None:
        split = split.filter(lambda row: row[data.score_column] >= data.min_score)
        if len(split) == 0:
            fail(f"no training pair has a {data.score_column} of at least --min_score {data.min_score}")
    return split.select_columns(columns)


def make_evaluator(data: DataArguments, batch_size: int) -> EmbeddingSimilarityEvaluator:
    """Return the evaluator, which computes the rank correlation of scores and cosine similarities."""
    first, second, rating = data.sts_columns
    limits, source = {data.sts_split: data.max_eval_samples}, SourceArguments(data.sts_name, None, data.sts_path)
    (split,) = load_splits(limits, source, (first, second), [rating]).values()
    return EmbeddingSimilarityEvaluator(split[first], split[second], split[rating], batch_size=batch_size, name="sts")


def load_data(
    data: DataArguments, model: ModelArguments, training: SentenceTransformerTrainingArguments
) -> tuple[Dataset | None, PreTrainedTokenizerBase, EmbeddingSimilarityEvaluator | None]:
    """Return the training pairs, the tokenizer and the evaluator."""
    pairs = load_pairs(data) if training.do_train else None
    texts = (text for column in data.text_columns for text in pairs[column]) if pairs else ()
    tokenizer = make_tokenizer(model, texts, data.max_seq_length)
    return pairs, tokenizer, make_evaluator(data, training.per_device_eval_batch_size) if training.do_eval else None


def make_embedder(
    data: DataArguments, model: ModelArguments, tokenizer: PreTrainedTokenizerBase, device: str
) -> SentenceTransformer:
    """Return the encoder with pooling; sentence-transformers can only load it from a folder."""
    config = make_config(model, tokenizer, data.max_seq_length)
    encoder = make_model(AutoModel, model, config)
    with TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(folder)
    transformer.max_seq_length = data.max_seq_length
    transformer.model.config._name_or_path = ""  # the temporary folder
    return SentenceTransformer(modules=[transformer, Pooling(config.hidden_size, data.pooling)], device=device)


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    begin_run(data, model, training, run)

    with training.main_process_first(desc="reading the data"), one_line():
        pairs, tokenizer, evaluator = load_data(data, model, training)

    embedder = make_embedder(data, model, tokenizer, str(training.device))
    loss = MultipleNegativesRankingLoss(embedder, scale=data.scale)
    trainer = SentenceTransformerTrainer(embedder, training, train_dataset=pairs, loss=loss, evaluator=evaluator)

    metrics = train(trainer, run) | score(trainer)
    if training.do_train:  # sentence-transformers writes the model card
        if model.license:
            trainer.model.model_card_data.set_license(model.license)
        trainer.create_model_card()
        if training.push_to_hub:
            trainer.push_to_hub()
    return metrics


if __name__ == "__main__":
    main()
