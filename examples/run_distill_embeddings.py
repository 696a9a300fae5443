"""Distill a sentence encoder into a Luna for long texts by the cosine of their vectors and states.

    python examples/run_distill_embeddings.py --teacher sentence-transformers/all-MiniLM-L6-v2 \
        --dataset_name stanfordnlp/imdb --validation_split test --max_steps 100 --output_dir OUT

The teacher is a sentence-transformers model, or an encoder, whose token states are then averaged. After
`import luna_mega`, `SentenceTransformer("OUT")` loads the output folder. All fields of TrainingArguments are options.
"""

from dataclasses import dataclass, field

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.hf_argparser import HfArg

from luna_mega.distillation import from_teacher
from luna_mega.distillation.embedding_trainer import EmbeddingTrainer
from luna_mega.distillation.embeddings import (
    SALIENCE_LEARNING_RATE,
    STATE_WEIGHT,
    SentenceTeacher,
    load_sentence_teacher,
)
from luna_mega.training.arguments import RunArguments, check_choice, check_least, fail, one_line, parse_arguments
from luna_mega.training.data import LimitArguments, SourceArguments, choose_splits, load_splits
from luna_mega.training.hub import publish
from luna_mega.training.models import load_tokenizer
from luna_mega.training.runs import begin_run, check_run, make_callbacks, score, train

TITLE = "distillation of embeddings"


@dataclass
class DataArguments(SourceArguments, LimitArguments):
    text_column: str = HfArg(default="text", help="column with the texts")
    validation_split: str = HfArg(default="validation", help="split of the evaluation")
    max_seq_length: int | None = HfArg(
        default=None, help="longest training and validation text in tokens (default: --max_length)"
    )
    salience_texts: int = HfArg(default=120, help="training texts that the salience is fitted on")


@dataclass
class ModelArguments:
    teacher: str = HfArg(default="", help="sentence-transformers model or encoder: folder or Hub name")
    teacher_window: int | None = HfArg(
        default=None,
        help="tokens per window of the teacher; longer texts use the mean over windows (default: its limit)",
    )
    projection_length: int = HfArg(default=128, help="rows l of the packed sequence that is saved")
    projection_lengths: list[int] = HfArg(
        default_factory=lambda: [32, 64, 128], help="rows of the training steps and evaluations"
    )
    max_length: int | None = HfArg(
        default=None, help="longest text of the student in tokens (default: the teacher's number of positions)"
    )
    position_extension: str = HfArg(default="interpolate", help="positions beyond the teacher's: interpolate or wrap")
    salience_learning_rate: float = HfArg(default=SALIENCE_LEARNING_RATE, help="learning rate of the salience")
    state_weight: float = HfArg(
        default=STATE_WEIGHT,
        help="weight of the cosine distance of the states of all tokens and layers; 0 = only vectors",
    )
    license: str | None = HfArg(default=None, help="license of the weights, for the model card: apache-2.0")
    model_name_or_path: str | None = field(default=None, init=False)
    model_type: str = field(default="luna", init=False)

    def __post_init__(self):
        self.model_name_or_path = self.teacher


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments, RunArguments]:
    """Parse the options; exit if they contradict each other."""
    kinds = (DataArguments, ModelArguments, TrainingArguments, RunArguments)
    data, model, training, run = parse_arguments(kinds, argv, do_train=True, do_eval=True, learning_rate=2e-4)
    check_run(TITLE, data, model, training, run, predicts=False)
    if not model.teacher:
        fail("--teacher is missing; pass a folder or a name on the Hub")
    check_choice(model, "position_extension", ("interpolate", "wrap"))
    check_least(model, 1, "projection_length", "projection_lengths")
    check_least(model, 0, "state_weight")
    check_least(data, 1, "salience_texts")
    check_least(data, 3, "max_seq_length")
    check_least(model, 3, "max_length")
    check_longest(data, model.max_length)
    return data, model, training, run


def check_longest(data: DataArguments, max_length: int | None):
    if max_length is not None and (data.max_seq_length or 0) > max_length:
        fail(f"--max_seq_length {data.max_seq_length} exceeds --max_length {max_length}; raise the latter")


def load_data(data: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    """Return the texts; the training texts are also required for the salience of an evaluation."""
    limits = {"train": data.max_train_samples} | choose_splits(training, data, (data.validation_split,))
    return load_splits(limits, data, [data.text_column])


def make_model(
    model: ModelArguments, texts: list[str], training: TrainingArguments
) -> tuple[SentenceTeacher, PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the teacher, the student that is converted from it, and the tokenizer."""
    with one_line(f"--teacher {model.teacher}"):
        teacher = load_sentence_teacher(model.teacher, model.teacher_window)
        sizes = (model.projection_length, model.max_length, model.position_extension)
        student, tokenizer, report = from_teacher(teacher.model, *sizes, texts, load_tokenizer(model.teacher))
    if training.process_index == 0:
        print(report, flush=True)
    return teacher, student, tokenizer


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    begin_run(data, model, training, run)

    with training.main_process_first(desc="reading the data"), one_line():
        splits = load_data(data, training)
    count = min(data.salience_texts, len(splits["train"]))
    texts = list(splits["train"].shuffle(training.seed).take(count)[data.text_column])
    teacher, student, tokenizer = make_model(model, texts, training)
    check_longest(data, tokenizer.model_max_length)
    longest = data.max_seq_length or tokenizer.model_max_length

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list]:
        return dict(tokenizer(batch[data.text_column], truncation=True, max_length=longest))

    encoded = {name: x.map(tokenize, batched=True, remove_columns=x.column_names) for name, x in splits.items()}
    trainer = EmbeddingTrainer(
        student,
        training,
        train_dataset=encoded["train"],
        eval_dataset=encoded.get(data.validation_split),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=make_callbacks(data),
        teacher=teacher,
        projection_length=model.projection_length,
        projection_lengths=model.projection_lengths,
        salience_learning_rate=model.salience_learning_rate,
        state_weight=model.state_weight,
        max_length=longest,
    )
    metrics = train(trainer, run) | score(trainer)
    publish(trainer, run)
    return metrics


if __name__ == "__main__":
    main()
