"""Copy the weights of an encoder bit for bit into a Luna of the same sizes, and report what was copied."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from luna_mega.distillation.parts import LUNA, Parts
from luna_mega.distillation.teachers import Teacher


@dataclass
class CopyReport:
    """Record of `copy_encoder`, by names of parameters."""

    copied: dict[str, str] = field(default_factory=dict)  # student's name -> teacher's name
    new: list[str] = field(default_factory=list)  # parameters of the student without a counterpart
    left: list[str] = field(default_factory=list)  # parameters of the teacher without a counterpart


@torch.no_grad()
def copy_encoder(teacher: Teacher, student: PreTrainedModel) -> CopyReport:
    """Copy the weights of an encoder, with any head, into a Luna of the same sizes with the same head."""
    own, report, used = Parts(student, LUNA), CopyReport(), set()
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    places: list[tuple[str, int | None]] = [(part, None) for part in LUNA.model if part != "positions"]
    places += [(part, layer) for layer in range(len(own.layers)) for part in LUNA.layer]
    words = own.module("words").weight
    for place in places:
        target, source = own.module(*place), teacher.module(*place)
        if target is None or source is None:
            continue
        given = dict(source.named_parameters(recurse=False))
        for key, parameter in target.named_parameters(recurse=False):
            if place[0] == "decoder" and parameter is words:  # already copied, or another one in the teacher
                continue
            if key in given and given[key].shape == parameter.shape:
                parameter.copy_(given[key])
                report.copied[names[id(parameter)]] = f"{teacher.path(*place)}.{key}"
                used.add(id(given[key]))
    target, source = (model.module("positions").weight for model in (own, teacher))
    first = teacher.first_position
    target[student.config.position_offset :] = source[first:]
    report.copied[names[id(target)]] = f"{teacher.path('positions')}.weight" + (f"[{first}:]" if first else "")
    used.add(id(source))
    report.new = [name for name in names.values() if name not in report.copied]
    report.left = [name for name, tensor in teacher.model.named_parameters() if id(tensor) not in used]
    return report
