"""Random models, and modules with an error in one line, to check that a comparison finds it."""

from pathlib import Path
from types import ModuleType

import torch


@torch.no_grad()
def random_model(make, *arguments, **options) -> torch.nn.Module:
    """Return an evaluated model in float64 with random parameters and statistics."""
    torch.manual_seed(0)
    model = make(*arguments, **options).double().eval()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_(std=0.7)
            if name.endswith("running_var"):
                tensor.abs_().add_(0.5)
    return model


def mutate(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """Return a copy of a module with other text; `changes` are texts that occur once, and their replacements."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    for correct, wrong in changes:
        assert source.count(correct) == 1, correct
        source = source.replace(correct, wrong)
    copy = ModuleType(module.__name__)
    exec(source, copy.__dict__)
    return copy
