"""Each script is a single file that can be read from top to bottom, with few helper modules."""

import ast
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from luna_mega import training as lib
from luna_mega.training import runs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))
SCRIPTS = [*sorted(EXAMPLES.glob("run_*.py")), EXAMPLES / "lra" / "run_lra.py"]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_sizes():
    for path in FILES:
        limit = 340 if path in SCRIPTS else 350
        assert len(path.read_text(encoding="utf-8").splitlines()) <= limit, path
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (path, node.name)


def test_a_script_imports_no_other_script():
    names = {file.stem for file in FILES} | {"common"}
    for path in EXAMPLES.glob("run_*.py"):
        for node in ast.walk(parse(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {module.partition(".")[0] for module in modules} & names, path


def test_scripts_import_the_library_by_one_name():
    for path in FILES:
        nodes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
        lines = [line for line in map(ast.unparse, nodes) if "luna_mega" in line and "training" in line]
        assert lines in ([], ["from luna_mega import training as lib"]), path


@pytest.mark.parametrize("error", [False, True])
def test_a_run_publishes_a_model_after_its_evaluation(error, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(lib.Run, "_train", lambda run, trainer: steps.append("train") or {"train_loss": 1.0})
    monkeypatch.setattr(runs, "publish", lambda trainer: steps.append("publish"))
    model, data = lib.CheckpointArguments(), lib.SourceArguments(dataset_path=str(tmp_path))
    training = TrainingArguments(str(tmp_path), do_train=True, use_cpu=True)
    monkeypatch.setattr(runs, "plot_losses", lambda folders, file: steps.append(Path(file).name))
    callbacks = {"add_callback": lambda callback: None, "pop_callback": lambda callback: None}
    trainer = SimpleNamespace(**callbacks, save_state=int, is_world_process_zero=lambda: True)
    describe = lambda *about: steps.append(about[3])  # noqa: E731

    def evaluate() -> dict[str, float]:
        steps.append("evaluate")
        if error:
            raise ValueError
        return {"eval_loss": 2.0}

    with pytest.raises(ValueError) if error else nullcontext():
        metrics = lib.Run(data, model, training).fit(trainer, evaluate=evaluate, describe=describe)
        assert metrics == {"train_loss": 1.0, "eval_loss": 2.0}
    assert steps[:2] == ["train", "evaluate"]
    assert steps[2:] == ([] if error else ["training.png", {"dataset": tmp_path.name}, "publish"])
