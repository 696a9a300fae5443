"""Trains an encoder to embed sentences, so that those that belong together are near each other.

    python examples/train_sentence_transformer.py --model_name_or_path luna-base \\
        --dataset_name sentence-transformers/all-nli --dataset_config triplet --text_columns anchor positive negative \\
        --sts_name sentence-transformers/stsb --do_train --do_eval --output_dir OUT

Each pair is ranked before the other sentences of its batch (MultipleNegativesRankingLoss), and the similarity of
sentences is judged by a data set of scored pairs (STS). Needs sentence-transformers. The output folder loads by
`SentenceTransformer("OUT")` after `import luna_mega`. Every field of SentenceTransformerTrainingArguments is an option.
"""

from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from common.arguments import check_choice, check_least, fail
from common.data import LimitArguments, SourceArguments, check_columns, check_source, check_texts, load_splits
from common.model import make_config, make_model, make_tokenizer
from common.script import Script
from datasets import Dataset
from transformers import AutoModel, PreTrainedTokenizerBase

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
    fail("sentence-transformers is not installed: pip install '.[examples,ecosystem]'")

POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens")


@dataclass
class DataArguments(SourceArguments, LimitArguments):
    text_columns: list[str] = field(
        default_factory=lambda: ["sentence1", "sentence2"],
        metadata={"help": "the sentence, what belongs to it and, as a third column if there is one, what does not"},
    )
    score_column: str | None = field(default=None, metadata={"help": "score of a training pair, see --min_score"})
    min_score: float = field(default=0.0, metadata={"help": "leave out training pairs with a lower score"})
    sts_name: str | None = field(default=None, metadata={"help": "Hub name of the scored pairs to judge by"})
    sts_path: str | None = field(default=None, metadata={"help": "local folder instead, with a file for the split"})
    sts_split: str = field(default="validation", metadata={"help": "the split of these pairs"})
    sts_columns: list[str] = field(
        default_factory=lambda: ["sentence1", "sentence2", "score"],
        metadata={"help": "their columns: two of text and the score, on any scale"},
    )
    max_seq_length: int = field(default=128, metadata={"help": "longer sentences are cut"})
    pooling: str = field(default="mean", metadata={"help": f"embedding of a sentence: {', '.join(POOLINGS)}"})
    scale: float = field(default=20.0, metadata={"help": "what the loss multiplies cosines by"})


class SentenceEmbedding(Script):
    data_arguments = DataArguments
    training_arguments = SentenceTransformerTrainingArguments
    # Of two equal sentences in a batch each would count as wrong for the other.
    defaults = {"batch_sampler": "no_duplicates"}
    title, metric = "Sentence embeddings", "eval_sts_spearman_cosine"

    def check(self) -> None:
        data = self.data
        super().check()
        self.training.include_num_input_tokens_seen = "no"  # Trainer finds no tokens in batches of pairs
        if self.training.do_train:
            check_source(data)
            if len(data.text_columns) not in (2, 3):
                fail(f"--text_columns {' '.join(data.text_columns)} must name two columns, or three")
        judged = self.training.do_eval or self.training.eval_strategy != "no"
        if judged and (data.sts_name is None) == (data.sts_path is None):
            fail("evaluation needs one of --sts_name and --sts_path")
        if len(data.sts_columns) != 3:
            fail(f"--sts_columns {' '.join(data.sts_columns)} must name two columns of text and the score")
        check_choice(data, "pooling", POOLINGS)
        check_least(data, 2, "max_seq_length")
        self.judged = judged

    def pairs(self) -> Dataset:
        """Return the training pairs, or triplets."""
        data, columns = self.data, self.data.text_columns
        split = load_splits(self.limits()["train"], data.dataset_path, data.dataset_name, data.dataset_config)["train"]
        check_texts(split, "train", tuple(columns))
        if data.score_column is not None:
            check_columns(split, "train", [data.score_column])
            split = split.filter(lambda row: row[data.score_column] >= data.min_score)
            if len(split) == 0:
                fail(f"no training pair has a {data.score_column} of at least --min_score {data.min_score}")
        return split.select_columns(columns)

    def limits(self) -> dict[str, Any]:
        """Return the splits of the training data and of the scored pairs, with the number of rows to use of each."""
        data = self.data
        return {"train": {"train": data.max_train_samples}, "sts": {data.sts_split: data.max_eval_samples}}

    def evaluator(self) -> EmbeddingSimilarityEvaluator:
        """Return the judge by scored pairs: the rank correlation of scores and cosines."""
        data, (first, second, score) = self.data, self.data.sts_columns
        split = load_splits(self.limits()["sts"], data.sts_path, data.sts_name, None)[data.sts_split]
        check_texts(split, data.sts_split, (first, second))
        check_columns(split, data.sts_split, [score])
        size = self.training.per_device_eval_batch_size
        return EmbeddingSimilarityEvaluator(split[first], split[second], split[score], batch_size=size, name="sts")

    def embed(self, tokenizer: PreTrainedTokenizerBase) -> SentenceTransformer:
        """Return the encoder with its pooling, which sentence-transformers reads from a folder."""
        data = self.data
        config = make_config(self.model, tokenizer, data.max_seq_length)
        encoder = make_model(AutoModel, self.model, config)
        with TemporaryDirectory() as folder:
            encoder.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            transformer = Transformer(folder)
        transformer.max_seq_length = data.max_seq_length
        transformer.model.config._name_or_path = ""  # the folder is gone
        return SentenceTransformer(
            modules=[transformer, Pooling(config.hidden_size, data.pooling)], device=str(self.training.device)
        )

    def prepare(self) -> None:
        pairs = self.splits["train"] = self.pairs() if self.training.do_train else None
        texts = (text for column in self.data.text_columns for text in pairs[column]) if pairs else ()
        self.tokenizer = make_tokenizer(self.model, texts, self.data.max_seq_length)
        self.judge = self.evaluator() if self.judged else None

    def build(self) -> SentenceTransformerTrainer:
        model = self.embed(self.tokenizer)
        return SentenceTransformerTrainer(
            model,
            self.training,
            train_dataset=self.splits["train"],
            loss=MultipleNegativesRankingLoss(model, scale=self.data.scale),
            evaluator=self.judge,
        )

    def before_evaluation(self) -> dict[str, Any]:
        """Report pairs per second in place of tokens."""
        history = self.trainer.state.log_history
        speeds = [entry["train_samples_per_second"] for entry in history if "train_samples_per_second" in entry]
        return {"tokens_per_second": None, "pairs_per_second": speeds[-1] if speeds else None}

    def publish(self, summary: dict[str, Any]) -> None:
        """Push the folder where `--push_to_hub` asks for it; sentence-transformers has written the model card."""
        if self.model.license:
            self.trainer.model.model_card_data.set_license(self.model.license)
        self.trainer.create_model_card()
        if self.training.push_to_hub:
            self.trainer.push_to_hub()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return SentenceEmbedding(argv).run()


if __name__ == "__main__":
    main()
