"""Distillation of transformers into Luna and Mega: copy, calibrate, align, distill (docs/distillation.md)."""

from luna_mega.distillation.alignment import (
    align as align,
    aligned_parameters as aligned_parameters,
    train_only as train_only,
)
from luna_mega.distillation.calibration import (
    calibrate as calibrate,
    calibration_error as calibration_error,
    scale_logits as scale_logits,
)
from luna_mega.distillation.copying import (
    CopyReport as CopyReport,
    copy_weights as copy_weights,
    extend_positions as extend_positions,
)
from luna_mega.distillation.distilling import Distilled as Distilled, distill as distill
from luna_mega.distillation.exact import fit_salience as fit_salience, from_teacher as from_teacher
from luna_mega.distillation.loading import check_tokenizer as check_tokenizer, load_teacher as load_teacher
from luna_mega.distillation.students import (
    build_student as build_student,
    check_pair as check_pair,
    student_config as student_config,
)
from luna_mega.distillation.teachers import Teacher as Teacher
