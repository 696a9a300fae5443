"""Convert trained encoders to Lunas with equal results (docs/distillation.md)."""

from luna_mega.distillation.exact import (
    Converted as Converted,
    fit_salience as fit_salience,
    from_teacher as from_teacher,
)
from luna_mega.distillation.loading import load_teacher as load_teacher
from luna_mega.distillation.teachers import Teacher as Teacher
