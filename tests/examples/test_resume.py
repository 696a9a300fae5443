"""A run that resumes in the middle of an epoch has the weights and the losses of an uninterrupted run."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from luna_mega.training.streams import Reseeded
from tests.examples.contract import BERT, CHUNKS, MEGA
from tests.examples.runs import TINY, assert_error, log_history, steps
from tests.marks import slow_but

MEGALODON = "hidden_size=16,num_hidden_layers=1,num_attention_heads=1,shared_representation_size=8,value_size=16"
MEGALODON += ",intermediate_size=16,ema_projection_size=2,norm_num_groups=4,chunk_size=8,dropout_prob=0.1"
# An epoch has five steps. The checkpoint is in the middle of the second epoch and of the steps between two logs.
STEPS, SAVED = 9, 7
CUT = ["--max_steps", STEPS, "--save_steps", SAVED, "--logging_steps", 3]
COSTS = ("runtime", "per_second", "_time", "total_flos")
GLUE, CLM, TRANSLATION = ["run_glue"], ["run_clm"], ["run_translation"]
MLM = ["run_mlm", "--max_seq_length", 16, "--mlm_probability", 0.3]
IMAGES = ["run_image_classification", "--config_overrides"]
IMAGES += [f"{MEGA},drop_path_rate=0.2,relative_positional_bias=rotary"]
EVALUATED = ["--do_eval", "--eval_strategy", "steps", "--eval_steps", 2]
CARRIED = [*CLM, "--carry_state", "true", "--config_overrides"]
BY_TOKENS = ["--per_device_train_batch_size", 8, "--max_tokens"]  # the default; others are refused
CASES: dict[str, list] = {
    "glue": [*GLUE, "--token_dropout", 0.2, "--bf16", *EVALUATED],
    "glue, accumulation": [*GLUE, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--data_seed",
                           3, "--dataloader_num_workers", 1, "--neftune_noise_alpha", 5, "--token_dropout", 0.2,
                           "--config_overrides", f"{TINY},layerdrop=0.3,word_dropout=0.2"],
    "glue, by length": [*GLUE, "--train_sampling_strategy", "group_by_length", "--optim", "adafactor",
                        "--lr_scheduler_type", "cosine", "--model_type", "bert", "--config_overrides", BERT],
    "glue, other sampler": [*GLUE, "--accelerator_config", '{"use_seedable_sampler": false}', *EVALUATED,
                            "--eval_on_start", "--lr_scheduler_type", "reduce_lr_on_plateau"],
    "text": ["run_text_classification", "--model_type", "mega", "--config_overrides",
             f"{CHUNKS},normalization_type=batchnorm", "--token_dropout", 0.3],
    "race": ["run_race", "--model_type", "mega", "--config_overrides", MEGA],
    "mlm, by length": [*MLM, "--short_seq_prob", 0.9, "--train_sampling_strategy", "group_by_length", *EVALUATED,
                       "--model_type", "mega", "--config_overrides", MEGA],
    "mlm, streaming": [*MLM, "--streaming", "true", "--shuffle_buffer", 3],
    "clm": [*CLM, "--config_overrides", CHUNKS, "--min_block_size", 8, *BY_TOKENS, 40, "--validation_share", 0.2,
            *EVALUATED],
    "clm, streaming": [*CLM, "--config_overrides", CHUNKS, "--min_block_size", 8, "--streaming", "true",
                       "--gradient_checkpointing"],
    "clm, carried mega": [*CARRIED, CHUNKS, *EVALUATED, "--validation_share", 0.2],
    "clm, carried mega without chunks": [*CARRIED, MEGA],
    "clm, carried luna": [*CARRIED, f"{TINY},position_embedding_type=sinusoidal", "--model_type", "luna",
                          "--gradient_accumulation_steps", 2, "--per_device_train_batch_size", 2],
    "clm, carried megalodon": [*CARRIED, MEGALODON, "--model_type", "megalodon"],
    "audio": ["run_audio", "--random_shift", 0.01, "--random_speed", 0.1, "--random_gain", 3, "--random_noise", 0.1],
    "images": [*IMAGES, "--crop_padding", 1, "--horizontal_flip", "true", "--label_smoothing_factor", 0.1],
    "images, global random numbers": [*IMAGES, "--auto_augment", "none"],  # with a mock of timm
    "images, timm": [*IMAGES, "--image_size", 32, "--auto_augment", "rand-m9-mstd0.5-inc1", "--random_erasing", 0.5,
                     "--mixup", 0.8, "--cutmix", 1.0, "--repeated_augmentation", 2],
    "lra": ["lra.run_lra", "--warmup_power", 2, "--warmup_steps", 4, "--self_pretraining_steps", 2],
    "translation": [*TRANSLATION, "--clip_each", 0.1, "--max_grad_norm", 0, "--label_smoothing_factor", 0.1,
                    "--model_type", "mega", "--config_overrides", MEGA, "--milestones", 4, 8, *BY_TOKENS, 64,
                    "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 2],
}  # fmt: skip
FAST = ["glue", "clm, streaming", "clm, carried mega", "audio", "images", "images, global random numbers"]


def logged(output: Path, after: int) -> list[dict]:
    """Return the log after a step, without times."""
    rows = [row for row in log_history(output) if row["step"] > after]
    return [{key: value for key, value in row.items() if not key.endswith(COSTS)} for row in rows]


def assert_equal(resumed: Path, complete: Path, after: int) -> None:
    """Check that weights and logs of two runs are equal."""
    weights = [load_file(output / "model.safetensors") for output in (resumed, complete)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert logged(resumed, after) == logged(complete, after)


@pytest.fixture
def train(train) -> Callable[..., Path]:
    """Return a function that trains with a checkpoint, and returns the output folder."""
    return lambda output, name, *options: train(output, name, *CUT, *options)


class RandomProcessor:
    """Mock of timm: a transform that draws numbers of all global generators."""

    @staticmethod
    def create_transform(*_, **__) -> Callable:
        return lambda image: torch.rand(1, 8, 8) + random.random() + np.random.rand()


@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_resumed_run_equals_the_uninterrupted_run(train, case, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bw": True})  # any CPU can emulate bfloat16
    if case == "images, timm":
        pytest.importorskip("timm")
    elif case == "images, global random numbers":
        monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(data=RandomProcessor))
        monkeypatch.setitem(sys.modules, "timm.data", RandomProcessor)
    complete = train("complete", *CASES[case])
    resumed = train("resumed", *CASES[case], "--resume_from_checkpoint", complete / f"checkpoint-{SAVED}")
    assert steps(resumed) == STEPS
    assert_equal(resumed, complete, after=SAVED)


class Draws:
    """Examples that are global random numbers."""

    def __getitem__(self, index: int) -> float:
        return random.random()


def test_global_random_numbers_of_examples():
    """They differ by index and epoch, and the state of the generator does not change."""
    split, state = Reseeded(Draws(), seed=1), random.getstate()
    first = [split[0], split[1], split[0]]
    split.set_epoch(1)
    assert first[0] == first[2] and len({*first, split[0]}) == 3 and random.getstate() == state


def test_checkpoint_at_the_end_of_an_epoch(train):
    """Logs and evaluations at the end of an epoch precede its checkpoint."""
    options = [*GLUE, "--do_eval", "--eval_strategy", "epoch", "--logging_strategy", "epoch", "--save_steps", 5]
    complete = train("complete", *options)
    resumed = train("resumed", *options, "--resume_from_checkpoint", complete / "checkpoint-5")
    assert_equal(resumed, complete, after=5)
    assert [row["step"] for row in logged(resumed, after=0) if "eval_loss" in row] == [5, 9, 9]


STOPPED = [*GLUE, "--do_eval", "--eval_strategy", "steps", "--eval_steps", 1, "--save_steps", 1, "--learning_rate", 0]
STOPPED += ["--load_best_model_at_end", "--early_stopping_patience", 4]


def test_early_stopping_counts_all_evaluations(train):
    """With a learning rate of 0, only the first evaluation is better than all before. A finished run has no steps."""
    complete = train("complete", *STOPPED)
    for saved in (3, 5):
        resumed = train(f"from {saved}", *STOPPED, "--resume_from_checkpoint", complete / f"checkpoint-{saved}")
        assert steps(complete) == steps(resumed) == 5
        assert_equal(resumed, complete, after=saved if saved < 5 else 9)
    options = [option for option in STOPPED if option not in ("--early_stopping_patience", 4)]
    checkpoint = train("without", *options) / "checkpoint-3"
    assert steps(train("with", *STOPPED, "--resume_from_checkpoint", checkpoint)) == 7  # it has counted no evaluations


def test_finished_run_is_not_continued(train):
    """A run that is killed after its last checkpoint resumes with the same best weights, without more steps."""
    options = [*GLUE, *EVALUATED, "--save_steps", 2, "--max_steps", 4, "--load_best_model_at_end"]
    options += ["--metric_for_best_model", "loss", "--greater_is_better", 1]  # selects the first evaluation
    output = train("out", *options)
    before = load_file(output / "model.safetensors")
    (output / "model.safetensors").unlink()
    after = load_file(train("out", *options, "--resume_from_checkpoint", "last") / "model.safetensors")
    assert steps(output) == 4
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    best = load_file(output / "checkpoint-2" / "model.safetensors")
    torch.testing.assert_close(after, best, rtol=0, atol=0)


def test_last_checkpoint(train, tmp_path):
    """`last` is the newest complete checkpoint; a run that is killed while it saves leaves an incomplete one."""
    options = [*GLUE, "--save_steps", 3]
    output = train("out", *options)
    complete = shutil.copytree(output, tmp_path / "complete")
    state = (output / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8")
    shutil.rmtree(output / "checkpoint-9")
    for step, content in ((8, None), (9, state[:40])):
        (output / f"checkpoint-{step}").mkdir()
        if content is not None:
            (output / f"checkpoint-{step}" / "trainer_state.json").write_text(content, encoding="utf-8")
    assert_equal(train("out", *options, "--resume_from_checkpoint", "last"), complete, after=6)


@pytest.fixture
def checkpoint(train) -> Path:
    return train("complete", *CLM, "--config_overrides", CHUNKS, "--save_steps", 4) / "checkpoint-4"


def test_refused_options(train, checkpoint):
    options = [*CLM, "--config_overrides", CHUNKS, "--resume_from_checkpoint", checkpoint]
    for more, message in (
        (["--ignore_data_skip"], "--ignore_data_skip: a resumed run would train on other data; remove it"),
        (["--dataloader_num_workers", 1, "--dataloader_persistent_workers", "true"], "--dataloader_persistent_workers"),
        (["--carry_state", "true"], "--carry_state True: the checkpoint has no carried state"),
    ):
        assert_error(train, message, "resumed", *options, *more)
    for file in checkpoint.glob("rng_state*"):  # as --save_only_model
        file.unlink()
    assert_error(train, "has no optimizer, because it was saved with --save_only_model", "resumed", *options)
    carried = train("carried", *CASES["clm, carried mega"]) / f"checkpoint-{SAVED}"
    options = [*CASES["clm, carried mega"], "--resume_from_checkpoint", carried, "--carry_state", "false"]
    assert_error(train, "--carry_state False: the checkpoint has a carried", "resumed", *options)


def test_checkpoints_of_earlier_versions(train, checkpoint):
    (checkpoint / "run_state.pt").unlink()
    resumed = train("resumed", *CLM, "--config_overrides", CHUNKS, "--resume_from_checkpoint", checkpoint)
    losses = [row["loss"] for row in logged(resumed, after=4) if "loss" in row]
    final = json.loads((resumed / "all_results.json").read_text(encoding="utf-8"))["train_loss"]
    assert final == pytest.approx((2 * losses[0] + 3 * losses[1]) / 5)


def test_averages_need_the_earlier_checkpoints(train):
    options = [*TRANSLATION, "--save_steps", 3, "--average_checkpoints", 2]
    complete = train("complete", *options)
    source = ["--resume_from_checkpoint", complete / "checkpoint-6"]
    message = "--average_checkpoints needs the earlier checkpoints; pass --output_dir .*complete"
    assert_error(train, message, "resumed", *options, *source)
    before = load_file(complete / "model.safetensors")
    again = train("complete", *options, *source)
    torch.testing.assert_close(load_file(again / "model.safetensors"), before, rtol=0, atol=0)
