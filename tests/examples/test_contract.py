"""Every script: a run with all that it saves, a copy, its defaults, and models and tokenizers of others.

See `contract.py` for the rows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, BertTokenizer, PreTrainedModel, pipeline

from luna_mega.training.models import label_fields
from tests.examples.conftest import EXAMPLES
from tests.examples.contract import BERT, CLASSIFIERS, SCRIPTS, WORDS
from tests.examples.runs import QUIET, TINY, log_history, steps
from tests.marks import slow_but

LEARNING = ["--do_train", "--do_eval", "--per_device_train_batch_size", 8, "--learning_rate", 0.02]
LEARNING += ["--save_strategy", "steps", "--eval_strategy", "steps", "--load_best_model_at_end"]


def read_predictions(file: Path) -> list[str]:
    """Return the last column of a table, or the lines of a text."""
    found = file.read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[-1] for line in found[1:]] if file.suffix == ".tsv" else found


def load_as_the_card(output: Path) -> object:
    """Return the model that the code of a model card loads."""
    card, names = (output / "README.md").read_text(encoding="utf-8"), {}
    exec(card.split("```python\n")[1].split("```")[0].replace('"out"', repr(str(output))), names)  # code of the card
    return names["model"]


def reverse_head(model: PreTrainedModel, output: Path) -> None:
    """Save a classifier with its outputs and their names in the reversed order, which means the same."""
    names = [model.config.id2label[index] for index in range(model.config.num_labels)]
    for name, parameter in model.named_parameters():
        if name.startswith("classifier") and len(parameter) == len(names):
            parameter.data = parameter.data.flip(0)
    model.config.update(label_fields(names[::-1]))
    model.save_pretrained(output)


@pytest.mark.parametrize("name", SCRIPTS)
def test_run(name, call, script, tmp_path):
    """A model learns; its folder is all that is needed to predict, to evaluate, and to load it with the card's code.

    Labels are matched by name: the outputs of the evaluated classifier are in another order.
    """
    row, output = SCRIPTS[name], tmp_path / "out"
    data = row.write(tmp_path / "data", train=64, validation=16, test=8)
    source = [name, *row.data, *row.short, "--dataset_path", data]
    predicts = ["--do_predict"] * (row.written is not None)
    # the order by length must not change the order of the predictions
    by_length = ["--train_sampling_strategy", "group_by_length"] * (row.predict is not None and row.texts != ())
    lengths = ["--max_steps", row.steps, "--save_steps", row.steps // 2, "--eval_steps", row.steps // 2]
    options = [*source, *row.model, *LEARNING, *lengths, *predicts, *by_length, "--logging_steps", 4]
    summary = call(*options, "--output_dir", output)
    assert row.learned(summary), summary

    history, state = log_history(output), json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    speed = "train_samples_per_second" if name == "run_image_classification" else "train_tokens_per_second"
    assert any(entry.get(speed, 0) > 0 for entry in history)
    assert state["best_metric"] in [value for entry in history for key, value in entry.items() if "eval_" in key]

    card = (output / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n") and "on the data dataset." in card and "More information needed" not in card
    model, processor = row.auto.from_pretrained(output).eval(), row.processor.from_pretrained(output)
    assert type(load_as_the_card(output)) is type(model)
    if row.written is not None:
        found = row.predict(script(name), model, processor, row.rows(8, len("test")))
        assert read_predictions(output / row.written) == found

    if name in CLASSIFIERS and name != "run_race":
        reverse_head(model, output)
    again = call(*source, "--model_name_or_path", output, "--do_eval", *predicts, "--output_dir", tmp_path / "again")
    assert again["eval_loss"] == pytest.approx(summary["eval_loss"], abs=1e-5) and "train_loss" not in again
    if row.written is not None:
        assert read_predictions(tmp_path / "again" / row.written) == found


@pytest.mark.parametrize("name", SCRIPTS)
def test_defaults(name, script, tmp_path, capsys):
    """The defaults of Trainer and of the script are valid; lengths are reduced to the positions of the model."""
    row, output = SCRIPTS[name], tmp_path / "out"
    data = row.write(tmp_path / "data", train=16, validation=4)
    options = [*row.data, *row.model, *row.limits, "--dataset_path", data, "--output_dir", output, "--use_cpu"]
    summary = script(name).main([*map(str, options), "--do_train", "--do_eval", "--max_steps", "1"])
    assert steps(output) == 1 and summary["eval_loss"] > 0
    printed = capsys.readouterr().out
    assert all(line in printed for line in row.reduced) and printed.count("is reduced to") == len(row.reduced)
    if row.reduced:
        assert AutoTokenizer.from_pretrained(output).model_max_length <= 9


ACCUMULATED = {"lra.run_lra": ["--self_pretraining_steps", 1]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_do_not_depend_on_accumulation(name, train):
    """Trainer adds up the losses of the parts of a batch; a loss that it does not divide is four times as large."""
    losses = []
    for parts in (1, 4):
        batch = ["--per_device_train_batch_size", 16 // parts, "--gradient_accumulation_steps", parts]
        output = train(str(parts), name, *batch, "--max_steps", 1, *ACCUMULATED.get(name, []))
        results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
        losses.append({key: value for key, value in results.items() if key.endswith("_loss")})
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # parts differ in dropout and in their numbers of tokens


BART = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2"
OTHERS = {
    "bert": BERT,
    "roberta": BERT,
    "modernbert": BERT,
    "bart": f"{BART},encoder_ffn_dim=16,decoder_ffn_dim=16",
    "t5": "d_model=16,num_layers=1,num_heads=2,d_ff=16,d_kv=8",
    "llama": BERT,
    "vit": BERT,
}
TRAINED = [("run_clm", "bert"), ("run_mlm", "modernbert"), ("run_text_classification", "bart"), ("run_glue", "t5")]
MORE = [("run_clm", "bart"), ("run_clm", "llama"), ("run_mlm", "bart"), ("run_glue", "bart"), ("lra.run_lra", "bart")]
MORE += [("run_text_classification", "t5"), ("run_mlm", "roberta"), ("run_translation", "bart")]
MORE += [("run_image_classification", "vit")]


@pytest.mark.parametrize(("name", "model_type"), slow_but(TRAINED, TRAINED + MORE))
def test_other_models_are_evaluated(name, model_type, train):
    """Models of transformers with other outputs: encoder states, logits of masked tokens, no cache with labels."""
    options = ["--do_eval", "--max_steps", 1, "--model_type", model_type, "--config_overrides", OTHERS[model_type]]
    output = train("out", name, *options)
    assert json.loads((output / "all_results.json").read_text(encoding="utf-8"))["eval_loss"] > 0
    assert load_as_the_card(output).config.model_type == model_type
    if model_type == "roberta":  # the first token has the position after the padding id, 1
        assert AutoConfig.from_pretrained(output).max_position_embeddings == 34


TYPED = {
    "texts": ["run_text_classification"],
    "pairs": ["run_text_classification", "--text_columns", "text", "sentence", "--token_dropout", 0.1],
    "mlm": ["run_mlm", "--short_seq_prob", 0.3],
    "clm": ["run_clm", "--model_type", "luna"],
    "race": ["run_race"],
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """Save BERT's tokenizer, which returns two token types."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "the", "film", "was", "so", "good", "bad", "."]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "types"), slow_but([("texts", 2), ("pairs", 0)], [(x, n) for x in TYPED for n in (0, 2)])
)
def test_tokenizers_with_token_types(name, types, train, call, bert, tmp_path):
    """New models have the types; the tokenizer of a model without them, also when loaded again, returns none."""
    script, *options = TYPED[name]
    overrides = f"{TINY},position_embedding_type=sinusoidal" + ",type_vocab_size=0" * (types == 0)
    options += ["--tokenizer_name", bert]
    output = train("out", script, *options, "--config_overrides", overrides, "--do_eval", "--max_steps", 1)
    has_types = types > 0 and name != "clm"
    assert AutoConfig.from_pretrained(output).type_vocab_size == types * has_types
    found = AutoTokenizer.from_pretrained(output)("one", "two").get("token_type_ids")
    assert found == ([0, 0, 0, 1, 1] if has_types else None)
    data, before = tmp_path / f"data-{script}", json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    options += [*SCRIPTS[script].data, *SCRIPTS[script].short, "--model_name_or_path", output, "--do_eval"]
    again = call(script, *options, "--dataset_path", data, "--output_dir", tmp_path / "again")
    assert again["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-5)
    if script == "run_text_classification":
        assert pipeline("text-classification", model=str(output))({"text": "one", "text_pair": "two"})


COPIED = sorted(path.stem for path in EXAMPLES.glob("run_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [x if x == "run_race" else pytest.param(x, marks=pytest.mark.exhaustive) for x in COPIED]
)
def test_a_copied_script_trains(name, tmp_path):
    """A script is self-contained: it trains with the installed package in a folder without the other ones.

    Datasets hashes functions with all that they refer to; classes of `__main__` are pickled, not imported.
    """
    row, copy = SCRIPTS[name], tmp_path / "empty" / f"{name}.py"
    data, output = row.write(tmp_path / "data", train=16, validation=8), tmp_path / "out"
    copy.parent.mkdir()
    copy.write_bytes((EXAMPLES / copy.name).read_bytes())
    options = [*row.data, *row.short, *row.model, "--dataset_path", data, "--output_dir", output, *QUIET]
    options += ["--metric_path", EXAMPLES / "metrics" / "glue_metrics"] * (name == "run_glue")
    command = [sys.executable, copy, *options, "--do_train", "--do_eval", "--max_steps", 2]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=copy.parent, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    # dill also warns about `safe_open`, but only if the package is imported from a checkout.
    assert "<class '__main__." not in done.stderr
    results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    assert results["train_loss"] > 0 and results["eval_loss"] > 0 and results["train_runtime"] > 0
    assert (output / "README.md").is_file() and (output / "training.png").stat().st_size > 10_000
