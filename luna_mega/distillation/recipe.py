"""Options of a distillation, and creation of teacher and student."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from luna_mega import LunaConfig, MegaConfig
from luna_mega.distillation import (
    Teacher,
    build_student,
    calibrate,
    check_pair,
    check_tokenizer,
    copy_weights,
    load_teacher,
    student_config,
)
from luna_mega.distillation.alignment import plan_alignment
from luna_mega.distillation.calibration import calibration_error, scale_logits, solves_head
from luna_mega.distillation.families import Parts, find_family
from luna_mega.distillation.students import match_layers
from luna_mega.hub.folder import position_limit
from luna_mega.training.arguments import check_choice, check_least, fail, one_line
from luna_mega.training.models import load_tokenizer, parse_fields

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class DistillArguments:
    """Options of teacher, student and stages."""

    teacher: str = HfArg(default="", help="trained transformer: a folder or a name on the Hub")
    teacher_dtype: str = HfArg(default="auto", help="dtype of the teacher: float32, bfloat16, float16; auto = as saved")
    teacher_window: int | None = HfArg(default=None, help="window in which the teacher reads longer blocks")
    student: str = HfArg(default="luna", help="luna, mega, or the folder of one that was made before, to go on with it")
    projection_length: int | None = HfArg(default=None, help="rows of a new Luna's packed sequence")
    max_length: int | None = HfArg(default=None, help="positions; default: the teacher's, or a longer block")
    num_hidden_layers: int | None = HfArg(default=None, help="layers of a new student")
    layers: list[int] | None = HfArg(default=None, help="teacher layers of the student's layers, from 0 on: 0 3 7 11")
    positions: str = HfArg(default="windows", help="extension of positions: windows, copy, mirror or interpolate")
    config_overrides: str = HfArg(default="", help="fields of a new student: use_chunking=true,chunk_size=128")
    calibration_batches: int = HfArg(default=6, help="training batches for the calibration; 0 = none")
    calibration_gain: float | None = HfArg(default=None, help="sharpness; default: 12 for single positions, else 6")
    calibration_ridge: float = HfArg(default=0.01, help="strength of the regularization")
    max_calibration_error: float = HfArg(default=1.0, help="maximum error of the attention, in standard deviations")
    align_steps: int = HfArg(default=200, help="steps of alignment, layer by layer; 0 = none")
    align_learning_rate: float = HfArg(default=1e-3, help="learning rate of alignment")
    align_whole: bool = HfArg(default=False, help="align complete layers, even if only attention differs")
    distill_share: float = HfArg(default=0.5, help="weight of the teacher's loss; the labels have the rest")
    distill_temperature: float = HfArg(default=1.0, help="divisor of the logits in the teacher's loss")
    license: str | None = HfArg(default=None, help="license of the weights, for the model card: apache-2.0")
    model_name_or_path: str | None = field(default=None, init=False)
    model_type: str = field(default="", init=False)

    def __post_init__(self):
        self.model_name_or_path = self.teacher

    @property
    def is_new(self) -> bool:
        """Whether a new student is created."""
        return self.student in ("luna", "mega")


def check_options(model: DistillArguments, training: TrainingArguments) -> None:
    """Exit if options of teacher, student and stages contradict each other."""
    if not model.teacher:
        fail("--teacher is missing; pass a folder or a name on the Hub")
    if not (model.is_new or Path(model.student).is_dir()):
        fail(f"--student {model.student} is neither luna, mega, nor the folder of one")
    named = ("projection_length", "max_length", "num_hidden_layers", "config_overrides")
    if given := [name for name in named if getattr(model, name) not in (None, "") and not model.is_new]:
        fail(f"--{given[0]} is for a new student, but {model.student} is trained; omit it")
    check_choice(model, "teacher_dtype", DTYPES)
    check_choice(model, "positions", ("windows", "copy", "mirror", "interpolate"))
    check_least(model, 0, "align_steps", "calibration_batches")
    if not (0 <= model.distill_share <= 1 and model.distill_temperature > 0):
        fail("--distill_share must be from 0 to 1, and --distill_temperature above 0")
    if training.n_gpu > 1:
        fail(f"{training.n_gpu} GPUs require one process each; launch with torchrun or accelerate")
    if training.torch_compile:
        fail("--torch_compile: the stages require the layers of the student, which a compiled model hides; omit it")


def make_teacher(model: DistillArguments, block_size: int) -> tuple[Teacher, PreTrainedTokenizerBase]:
    """Return the teacher, in the dtype of its weights, and its tokenizer."""
    with one_line(f"--teacher {model.teacher}"):
        teacher, tokenizer = load_teacher(model.teacher, dtype="auto"), load_tokenizer(model.teacher)
        check_tokenizer(teacher, tokenizer)
        if model.teacher_window is not None:
            teacher = Teacher(teacher.model, model.teacher_window)
    kind, count = teacher.config.problem_type, teacher.config.num_labels
    if teacher.is_classifier and (kind == "multi_label_classification" or (kind == "regression" and count > 1)):
        fail(f"{model.teacher} predicts several labels; use a classifier with one label per text")
    asked = model.distill_share or model.align_steps or (model.is_new and model.calibration_batches)
    if asked and not reads_all(teacher, block_size):
        fail(
            f"--block_size {block_size} is more than the {teacher.max_length} tokens that the teacher supports; pass "
            f"--teacher_window {teacher.max_length} (language models), or --distill_share 0 --align_steps 0 "
            "--calibration_batches 0"
        )
    tokenizer.model_max_length = max(tokenizer.model_max_length, model.max_length or block_size)
    return teacher, tokenizer


def reads_all(teacher: Teacher, block_size: int) -> bool:
    """Return whether the teacher supports blocks of this size, possibly in windows."""
    return teacher.max_length is None or min(block_size, teacher.window or block_size) <= teacher.max_length


def move_teacher(teacher: Teacher, model: DistillArguments, training: TrainingArguments) -> None:
    """Move the teacher to the device of the training, and to its dtype, after its weights were copied."""
    dtype = None if model.teacher_dtype == "auto" else getattr(torch, model.teacher_dtype)
    teacher.model.to(training.device, dtype)


def make_student(teacher: Teacher, model: DistillArguments, block_size: int, folder: str | None) -> PreTrainedModel:
    """Return the student: loaded from `folder` or from `--student`, or new with random weights."""
    source = folder or (None if model.is_new else model.student)
    with one_line(f"--student {source or model.student}"):
        if source:
            auto_class = AutoModelForCausalLM if teacher.family.is_decoder else AutoModelForMaskedLM
            auto_class = AutoModelForSequenceClassification if teacher.is_classifier else auto_class
            student = auto_class.from_pretrained(source, dtype=torch.float32)
        else:
            student = build_student(teacher, configure(teacher, model, block_size))
        own = check_pair(teacher, student, same_width=bool(model.align_steps))
        match_layers(teacher, own, model.layers)
    if model.align_steps and getattr(student.config, "layerdrop", 0.0):
        fail("alignment runs every layer; set layerdrop=0.0, or --align_steps 0")
    limit = position_limit(student.config)
    if limit is not None and limit < block_size:
        fail(f"--block_size {block_size} is more than the {limit} positions of the student; raise --max_length")
    return student


def configure(teacher: Teacher, model: DistillArguments, block_size: int) -> LunaConfig | MegaConfig:
    """Return the configuration of a new student, with the positions of the teacher or of a longer block."""
    kind = {"luna": LunaConfig, "mega": MegaConfig}[model.student]
    depth = model.num_hidden_layers
    if depth is None and model.layers is not None:
        depth = len(model.layers)
    options = {"max_position_embeddings": model.max_length, "projection_length": model.projection_length}
    fields = {name: value for name, value in (options | {"num_hidden_layers": depth}).items() if value is not None}
    fields |= parse_fields(model.config_overrides)
    if unknown := [name for name in fields if not hasattr(kind(), name)]:
        fail(f"a {model.student} has no field {', '.join(unknown)}; see --projection_length and --config_overrides")
    fields = {kind.attribute_map.get(name, name): value for name, value in fields.items()}
    config = student_config(teacher, model.student, **fields)
    if model.max_length is None and (position_limit(config) or block_size) < block_size:
        length = kind.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        config = student_config(teacher, model.student, **{length: block_size} | fields)
    return config


def calibrates(teacher: Teacher, student: PreTrainedModel, model: DistillArguments) -> bool:
    """Return whether the student has a pack attention or a Mega's head to calibrate, and the teacher has none."""
    is_encoder = student.config.model_type == "luna" and not student.config.is_decoder
    packs = is_encoder and teacher.config.model_type != "luna"
    return bool(model.calibration_batches) and (packs or solves_head(teacher, check_pair(teacher, student)))


class Done(NamedTuple):
    """Result of a stage without training: its message, tokens and seconds."""

    text: str
    tokens: int
    seconds: float


def copy_student(teacher: Teacher, student: PreTrainedModel, model: DistillArguments) -> Done:
    """Copy the teacher's weights."""
    start = time.perf_counter()
    with one_line("stage copy"):
        report = copy_weights(teacher, student, model.layers, model.positions)
    text = f"stage copy: {len(report.copied)} tensors copied, {len(report.new)} new, {len(report.left)} left\n{report}"
    return Done(text, 0, time.perf_counter() - start)


def calibrate_student(
    teacher: Teacher, student: PreTrainedModel, model: DistillArguments, batches: list[dict[str, torch.Tensor]]
) -> Done:
    """Calibrate a student, identically on all processes; the last of several batches is held out."""
    start = time.perf_counter()
    batches, held_out = batches[: max(1, len(batches) - 1)], batches[-1]
    options = {"gain": model.calibration_gain, "ridge": model.calibration_ridge}
    with one_line("stage calibrate"):
        shares = calibrate(teacher, student, batches, model.layers, **options)
    _broadcast(student)
    tokens = sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)
    shown = ", ".join(f"{share:.2f}" for share in shares)
    if student.config.model_type == "luna":
        text = f"layers identify {shown} of the positions\n{_check_errors(teacher, student, model, held_out)}"
    else:
        text = f"head explain {shown} of its output"
    return Done(f"stage calibrate: the states of the {text}", tokens, time.perf_counter() - start)


def _check_errors(
    teacher: Teacher, student: PreTrainedModel, model: DistillArguments, batch: dict[str, torch.Tensor]
) -> str:
    """Return a line with the error of every layer; exit if the error of a calibrated attention is too large.

    If the other weights of the layers are not copied, the error has other causes than the calibration.
    """
    with one_line("stage calibrate"):
        errors = calibration_error(teacher, student, batch, model.layers)
        is_attention = plan_alignment(teacher, check_pair(teacher, student), model.layers).attention
    worst = max(range(len(errors)), key=errors.__getitem__)
    if is_attention and errors[worst] > model.max_calibration_error:
        fail(
            f"stage calibrate: the attention output of layer {worst} has an error of {errors[worst]:.2f} standard "
            f"deviations, above --max_calibration_error {model.max_calibration_error}; use a larger "
            "--projection_length, `luna-mega distill`, which requires no calibration, or raise the limit and align "
            "(--align_steps)"
        )
    shown = ", ".join(f"{error:.2f}" for error in errors)
    return f"error of the {'attention' if is_attention else 'layers'} on a held-out batch: {shown}"


def scale_student(student: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Scale the logits of a causal student so that its loss does not exceed the loss of uniform predictions.

    Returns:
        The parameters of the last norm before the change, with their names in the student.
    """
    own = Parts(student, find_family(student.config))
    prefix = own.path("last_norm")
    before = {name: x.clone() for name, x in student.state_dict().items() if prefix and name.startswith(f"{prefix}.")}
    scale_logits(student, batches[0])
    _broadcast(student)
    return before


def _broadcast(student: PreTrainedModel) -> None:
    if dist.is_initialized():  # rounding differs between processes
        for parameter in student.parameters():
            dist.broadcast(parameter.data, 0)
