"""run_translation.py: tokenizers, data, training, averages of checkpoints, scores, translations."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from luna_mega import LunaForConditionalGeneration, LunaSeq2SeqConfig
from luna_mega.training import models
from luna_mega.training.models import ModelArguments
from luna_mega.training.optimization import milestone_schedule
from luna_mega.training.tokenizers import make_bytes, train_joint_bpe
from tests.examples.contract import SCRIPTS, WORDS, pairs
from tests.examples.runs import assert_error, log_history, write

TINY = {  # by the model type
    "luna": "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,projection_length=8,"
    "dropout=0.0,attention_dropout=0.0,initializer_range=0.1"
}
TRAIN = ["--do_train", "--per_device_train_batch_size", 32, "--learning_rate", "1e-2", "--label_smoothing_factor", 0.1]


def make_pairs(count: int) -> list[dict[str, str]]:
    """Return pairs with a column per language."""
    return [row["translation"] for row in pairs(count, seed=count)]


@pytest.fixture
def run(call, tmp_path):
    """Return a function that runs the script with a tiny model and returns the summary."""
    data = SCRIPTS["run_translation"].write(tmp_path / "numbers", train=400, validation=20)
    new = ["--config_overrides", TINY["luna"], "--vocab_size", 300]
    short = ["--max_source_length", 16, "--max_target_length", 16, "--logging_steps", 10]

    def main(*arguments: object) -> dict:
        paths = ["--dataset_path", data, "--output_dir", tmp_path / "out"]
        return call("run_translation", *paths, *short, *new * ("--model_name_or_path" not in arguments), *arguments)

    return main


def test_encode(script):
    """Training omits sentences that are too long; evaluation truncates them, keeps </s>, and sorts by length."""
    translation = script("run_translation")
    tokenizer = train_joint_bpe(["a b c"], 260, 99)
    columns = {"source": ["a", "abcd", " ", "ab", "abc"], "target": ["b", "b", "b", "abcdef", "  "]}
    pairs = translation.Dataset.from_dict(columns)
    train, test = (translation.encode(pairs, name, (tokenizer,) * 2, 4, 6) for name in ("train", "test"))
    assert train["row"][:] == [0] and train["length"][:] == [6]
    assert test["row"][:] == [3, 1, 0, 4, 2] and test["target"][0] == "abcdef"
    assert [len(ids) for ids in test["input_ids"]] == [4, 4, 3, 4, 1]
    assert test["labels"][0][-1] == 2 and len(test["labels"][0]) == 6
    assert tokenizer.decode(test["labels"][0], skip_special_tokens=True) == "abcd"


def test_batches_by_tokens(run, script, tmp_path, monkeypatch):
    """Training batches have --max_tokens, evaluation batches a number of pairs; the speed of pairs is unknown."""
    shapes, collator = {True: [], False: []}, script("run_translation").PairCollator
    collate = collator.__call__

    def record(self, features, return_tensors=None):
        batch = collate(self, features, return_tensors)
        shapes[self.model.training].append([tuple(batch[side].shape) for side in ("input_ids", "labels")])
        return batch

    monkeypatch.setattr(collator, "__call__", record)
    options = ["--max_tokens", 96, "--max_steps", 6, "--do_train", "--do_eval", "--per_device_eval_batch_size", 3]
    assert "train_samples_per_second" not in run(*options)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- train_batch_tokens: 96 per device" in card and "train_batch_size" not in card
    assert all(math.prod(shape) <= 96 for batch in shapes[True] for shape in batch)
    assert len({batch[0][0] for batch in shapes[True]}) > 1 and max(batch[0][0] for batch in shapes[True]) > 8
    assert all(batch[0][0] <= 3 for batch in shapes[False]) and shapes[False]


@pytest.mark.slow
def test_table_of_contextual_projections(script, tmp_path):
    """The command trains both models of Luna's Table 5, and prints their scores with the published ones."""
    SCRIPTS["run_translation"].write(tmp_path / "wmt14", train=20, validation=4, test=4)
    options = ["--max_steps", 1, "--apollo", "false", "--average_checkpoints", 0, "--vocab_size", 300, "--use_cpu"]
    options += ["--num_beams", 1]
    options += ["--max_source_length", 16, "--max_target_length", 16, "--save_strategy", "no", "--eval_strategy", "no"]
    papers, output = script("papers"), tmp_path / "out.json"
    text = papers.main([*map(str, ["luna-table5", "--data", tmp_path, "--output", output, *options])])
    scores = json.loads(output.read_text(encoding="utf-8"))["scores"]
    printed = {"Non-Contextual": (24.4, 25.2), "Contextual": (25.9, 27.3)}
    assert text.splitlines()[2:] == [
        f"| {name} | {scores[name]['dev. BLEU']:.2f} ({dev}) | {scores[name]['test BLEU']:.2f} ({test}) |"
        for name, (dev, test) in printed.items()
    ]
    configs = [AutoConfig.from_pretrained(tmp_path / "out" / f"wmt14-{number}") for number in (0, 1)]
    assert [config.contextual_projection for config in configs] == [False, True]
    assert all(config.projection_length == 16 and config.tie_key_value for config in configs)


@pytest.mark.parametrize("side", ["source", "target"])
def test_tokenizer_must_append_an_end_token(tmp_path, side):
    joint = train_joint_bpe(["a b"], 260, 99)
    joint.save_pretrained(tmp_path)
    joint.save_pretrained(tmp_path / "target")
    arguments = models.ModelArguments(tokenizer_name=str(tmp_path))
    first, second = models.make_both_tokenizers(arguments, [], 99)
    assert first is not second and first("b").input_ids == second("b").input_ids == joint("b").input_ids
    bare = make_bytes()
    bare.save_pretrained(tmp_path if side == "source" else tmp_path / "target")
    assert_error(models.make_both_tokenizers, "does not end a sentence", arguments, [], 99)


def test_milestones():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = milestone_schedule(optimizer, 4, [6, 8], 0.1).lr_lambdas[0]
    factors = [schedule(step) for step in range(10)]
    assert factors == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 0.1, 0.1, 0.01, 0.01])
    late = milestone_schedule(optimizer, 2, [9], 0.1, start=0.5).lr_lambdas[0]
    assert [late(step) for step in (0, 1, 2, 8, 9)] == pytest.approx([0.5, 0.75, 1, 1, 0.1])
    for warmup in (0, 1):
        short = milestone_schedule(optimizer, warmup, [], 0.1).lr_lambdas[0]
        assert [short(0), short(1)] == [0, 1]


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """Write four checkpoints; the loss is lowest at steps 5 and 100."""
    losses = {5: 1.0, 20: 3.0, 30: 4.0, 100: 2.0}
    for step in losses:
        (tmp_path / f"checkpoint-{step}").mkdir()
        weights = {"weight": torch.full((2,), float(step), dtype=torch.bfloat16), "count": torch.tensor(step)}
        save_file(weights, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    history = [{"step": step, "eval_loss": loss, "eval_bleu": loss} for step, loss in losses.items()]
    text = json.dumps({"log_history": history})
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text(text, encoding="utf-8")
    return tmp_path


def test_averages_of_checkpoints(script, checkpoints):
    averaging = script("run_translation")
    for metric, used in ((None, [30, 100]), ("eval_loss", [100, 5]), ("eval_bleu", [20, 30])):
        chosen = averaging.choose_checkpoints(str(checkpoints), 2, metric)
        assert [path.name for path in chosen] == [f"checkpoint-{step}" for step in used]
        mean = averaging.average(chosen)
        assert mean["weight"].tolist() == [sum(used) / 2] * 2 and mean["weight"].dtype is torch.bfloat16
        assert mean["count"] == used[-1]
    for count, metric, message in ((5, None, "has 4 checkpoints, too few"), (2, "eval_x", "-5 has no eval_x")):
        assert_error(averaging.choose_checkpoints, message, str(checkpoints), count, metric)
    save_file({"other": torch.zeros(1)}, checkpoints / "checkpoint-100" / "model.safetensors")
    assert_error(
        averaging.average, "contains another model", [checkpoints / f"checkpoint-{step}" for step in (30, 100)]
    )


@pytest.mark.slow
def test_scores_translations_and_averages(run, script, tmp_path, capsys):
    """A model learns, its weights are averaged, and BLEU equals the score of the written translations."""
    other, out = write(make_pairs(20), tmp_path / "more" / "test.jsonl"), tmp_path / "out"
    often = ["--eval_strategy", "steps", "--eval_steps", 80, "--save_steps", 80, "--max_steps", 160, "--do_eval"]
    first = run(*TRAIN, *often, "--do_predict", "--test_paths", other, "--average_checkpoints", 2)
    assert first["eval_bleu"] > 50 and first["more_bleu"] > 50
    assert "averaged checkpoint-80, checkpoint-160\n" in capsys.readouterr().out
    assert first["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    weights = [load_file(path / "model.safetensors") for path in (out, out / "checkpoint-80", out / "checkpoint-160")]
    for name, mean in weights[0].items():
        torch.testing.assert_close(mean, (weights[1][name] + weights[2][name]) / 2)
    generation = AutoModelForSeq2SeqLM.from_pretrained(out).generation_config
    assert (generation.num_beams, generation.max_length) == (5, 17)
    written = (out / "translations.more.de").read_text(encoding="utf-8").splitlines()
    references = [[row["de"] for row in make_pairs(20)]]
    assert script("run_translation").BLEU().corpus_score(written, references).score == pytest.approx(first["more_bleu"])
    again = ["--model_name_or_path", out, "--do_eval", "--average_checkpoints", 2, "--average_by", "best"]
    run(*again, "--output_dir", tmp_path / "again")
    assert capsys.readouterr().out.count("checkpoint-") == 2


def test_separate_vocabularies(run, tmp_path):
    """A checkpoint with a tokenizer per language, as the converter writes it, can be trained and saved."""
    tokenizers = [train_joint_bpe(words, size, 99) for words, size in ((WORDS, 264), (WORDS.values(), 261))]
    sizes = {"vocab_size": len(tokenizers[0]), "decoder_vocab_size": len(tokenizers[1])}
    config = LunaSeq2SeqConfig(share_encoder_decoder_embeddings=False, **sizes)
    config.update_from_string(TINY["luna"])
    folder = tmp_path / "apart"
    LunaForConditionalGeneration(config).save_pretrained(folder)
    tokenizers[0].save_pretrained(folder)
    tokenizers[1].save_pretrained(folder / "target")
    summary = run(*TRAIN, "--model_name_or_path", folder, "--max_steps", 2, "--save_steps", 2, "--do_eval")
    assert "eval_bleu" in summary
    for place in ("out", "out/checkpoint-2"):
        loaded = models.make_both_tokenizers(ModelArguments(tokenizer_name=str(tmp_path / place)), [], 99)
        assert [len(tokenizer) for tokenizer in loaded] == [len(tokenizers[0]), len(tokenizers[1])]
    tokenizers[0].save_pretrained(folder / "target")
    message = "the target tokenizer has 264 tokens, the decoder only 261"
    assert_error(run, message, *TRAIN, "--model_name_or_path", folder, "--output_dir", tmp_path / "other")


def test_apollo_follows_the_schedule_and_clips_each_gradient(run, monkeypatch, tmp_path):
    """Apollo follows the schedule and clips each gradient.

    Its first step moves a parameter by lr / eps |g|, because the curvature is 0. Without `--predict_with_generate`,
    evaluation during training does not translate.
    """
    norms, apollo = [], pytest.importorskip("pytorch_optimizer").ApolloDQN

    class Watched(apollo):
        def step(self, closure=None):
            norms.append([float(p.grad.norm()) for group in self.param_groups for p in group["params"]])
            return super().step(closure)

    monkeypatch.setattr("pytorch_optimizer.ApolloDQN", Watched)
    options = ["--apollo", "true", "--clip_each", 0.01, "--max_grad_norm", 0, "--max_steps", 4, "--logging_steps", 1]
    options += ["--lr_scheduler_type", "constant_with_warmup", "--milestones", 3, "--warmup_steps", 2]
    options += ["--eval_strategy", "steps", "--eval_steps", 2]
    summary = run(*TRAIN, *options, "--warmup_init_lr", 1e-4, "--save_strategy", "no")
    history = log_history(tmp_path / "out")
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-4, 5.05e-3, 1e-2, 1e-3])
    assert sum("eval_bleu" in entry for entry in history) == 1 and "eval_bleu" in summary  # after the training
    assert len(norms) == 4 and 0.0099 < max(map(max, norms)) <= 0.01 + 1e-6
    assert sum(norm > 0.0099 for norm in norms[0]) > 5  # clips each gradient, not their total norm


def test_apollo_without_its_package(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    assert_error(run, "--apollo requires `pip install .pytorch_optimizer", *TRAIN, "--apollo", "true")
