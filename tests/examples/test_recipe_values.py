"""Values of recipes have the type of their option, as on the command line."""

import pytest

from tests.examples.runs import assert_error

INVALID = [
    *("max_steps: [1]", "max_steps: 8.5", "max_steps: 1e3", "max_steps: true", "max_steps: yes", "max_steps: 1:30"),
    *("max_steps: 0x10", "max_steps: 2026-01-01", "max_steps: {a: 1}", "max_steps: null", "max_steps: ~", "max_steps:"),
    *("max_steps: [[1]]", "max_steps: []", "max_steps: ten", "seed: 7.5", "seed: on", "seed: [7, 8]", "seed: 0b1"),
    *("seed: .nan", "learning_rate: true", "learning_rate: no", "learning_rate: 1:30", "learning_rate: [0.1]"),
    *("learning_rate: fast", "learning_rate: .inf", "learning_rate: {rate: 1}", "learning_rate: null"),
    *("bf16: 2", "bf16: maybe", "bf16: [true]", "bf16: null", "bf16: 1.0", "do_train: on", "do_train: {}"),
    *("save_strategy: never", "save_strategy: 1", "save_strategy: [no]", "save_strategy: null", "lr_scheduler_type: 1"),
    *("output_dir: [a]", "output_dir: {a: b}", "output_dir: null", "text_columns: []", "text_columns: {a: b}"),
    *("text_columns: [[a]]", "text_columns: null", "validation_share: half", "max_seq_length: 16.0"),
    *("seed: 1\nseed: 2", "steps: 5", "? [seed]\n: 1", "- seed", "seed", "", "label_column: [label]", "seed: &a [*a]"),
]
VALID = [
    ("max_steps: 010", "max_steps", 10),
    ("max_steps: '7'", "max_steps", 7),
    ("max_steps: -1", "max_steps", -1),
    ("learning_rate: 1e-3", "learning_rate", 1e-3),
    ("learning_rate: 1", "learning_rate", 1.0),
    ("save_strategy: no", "save_strategy", "no"),
    ("eval_strategy: no", "eval_strategy", "no"),
    ("do_train: yes", "do_train", True),
    ("do_eval: False", "do_eval", False),
    ("label_column: 010", "label_column", "010"),
    ("label_column: no", "label_column", "no"),
    ("label_column: 1:30", "label_column", "1:30"),
    ("label_column: 'null'", "label_column", "null"),
    ("label_column: 2026-01-01", "label_column", "2026-01-01"),
    ("text_columns: [a, yes]", "text_columns", ["a", "yes"]),
    ("text_columns: a", "text_columns", ["a"]),
    ("lr_scheduler_kwargs: {min_lr: 1e-7, a: true}", "lr_scheduler_kwargs", {"min_lr": 1e-7, "a": True}),
    ("lr_scheduler_kwargs: '{\"a\": 1}'", "lr_scheduler_kwargs", {"a": 1}),
]


@pytest.fixture
def parse(script, tmp_path):
    """Return a function that parses the options of a script with a recipe of this text."""

    def call(text: str) -> list[object]:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        options = ["--recipe", tmp_path / "recipe.yaml", "--dataset_path", tmp_path, "--use_cpu"]
        options += [] if text.startswith("do_train") else ["--do_train"]
        options += [] if text.startswith("output_dir") else ["--output_dir", tmp_path / "out"]
        return script("run_text_classification").parse([str(option) for option in options])

    return call


@pytest.mark.parametrize("text", INVALID)
def test_values_of_another_type(text, parse):
    assert_error(parse, r"error: (recipe .*recipe\.yaml: )", text)


@pytest.mark.parametrize(("text", "name", "value"), VALID)
def test_values_of_the_type(text, name, value, parse):
    found = next(getattr(group, name) for group in parse(text) if hasattr(group, name))
    assert found == value and isinstance(found, type(value))


def test_a_recipe_overrides_its_base(parse, tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 5\nmax_steps: 1\n", encoding="utf-8")
    training = parse("recipe: base.yaml\nmax_steps: 3\n")[2]
    assert (training.seed, training.max_steps) == (5, 3)
