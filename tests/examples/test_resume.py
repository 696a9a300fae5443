"""A run that resumes in the middle of an epoch has the weights and the losses of an uninterrupted run."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

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
TEXT = ["run_text_classification", "--model_type", "mega", "--config_overrides"]
MLM = ["run_mlm", "--max_seq_length", 16, "--mlm_probability", 0.3]
IMAGES = [
    "run_image_classification",
    "--config_overrides",
    f"{MEGA},drop_path_rate=0.2,relative_positional_bias=rotary",
]
EVALUATED = ["--do_eval", "--eval_strategy", "steps", "--eval_steps", 2]
CASES: dict[str, list] = {
    "glue": [*GLUE, "--token_dropout", 0.2, *EVALUATED],
    "glue, accumulation": [*GLUE, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2],
    "glue, layerdrop": [*GLUE, "--config_overrides", f"{TINY},layerdrop=0.3,word_dropout=0.2"],
    "glue, workers": [*GLUE, "--token_dropout", 0.2, "--dataloader_num_workers", 1],
    "glue, data seed": [*GLUE, "--data_seed", 3],
    "glue, other sampler": [*GLUE, "--accelerator_config", '{"use_seedable_sampler": false}'],
    "glue, by length": [*GLUE, "--train_sampling_strategy", "group_by_length"],
    "glue, adafactor": [*GLUE, "--optim", "adafactor", "--lr_scheduler_type", "cosine"],
    "glue, plateau": [*GLUE, *EVALUATED, "--lr_scheduler_type", "reduce_lr_on_plateau"],
    "glue, noise": [*GLUE, "--neftune_noise_alpha", 5],
    "glue, bert": [*GLUE, "--model_type", "bert", "--config_overrides", BERT],
    "glue, start": [*GLUE, *EVALUATED, "--eval_on_start"],
    "text": [*TEXT, f"{MEGA},normalization_type=batchnorm"],
    "text, dropout": [*TEXT, CHUNKS, "--token_dropout", 0.3],
    "race": ["run_race"],
    "race, mega": ["run_race", "--model_type", "mega", "--config_overrides", MEGA],
    "mlm": [*MLM, "--short_seq_prob", 0.3],
    "mlm, by length": [*MLM, "--short_seq_prob", 0.9, "--train_sampling_strategy", "group_by_length",
                       "--per_device_train_batch_size", 32],
    "mlm, small batches": [*MLM, "--short_seq_prob", 0.9, "--train_sampling_strategy", "group_by_length",
                           "--per_device_train_batch_size", 4],
    "mlm, mega": [*MLM, "--model_type", "mega", "--config_overrides", MEGA, *EVALUATED],
    "mlm, streaming": [*MLM, "--streaming", "true", "--shuffle_buffer", 3],
    "clm": [*CLM, "--config_overrides", CHUNKS, "--validation_share", 0.2, *EVALUATED],
    "clm, lengths": [*CLM, "--config_overrides", CHUNKS, "--min_block_size", 8],
    "clm, lengths and streaming": [*CLM, "--config_overrides", CHUNKS, "--min_block_size", 8, "--streaming", "true"],
    "clm, carried mega": [*CLM, "--config_overrides", CHUNKS, "--carry_state", "true", *EVALUATED,
                          "--validation_share", 0.2],
    "clm, carried mega without chunks": [*CLM, "--config_overrides", MEGA, "--carry_state", "true"],
    "clm, carried luna": [*CLM, "--model_type", "luna", "--carry_state", "true", "--config_overrides",
                          f"{TINY},position_embedding_type=sinusoidal"],
    "clm, carried megalodon": [*CLM, "--model_type", "megalodon", "--carry_state", "true", "--config_overrides",
                               MEGALODON],
    "clm, carried, accumulation": [*CLM, "--config_overrides", CHUNKS, "--carry_state", "true",
                                   "--gradient_accumulation_steps", 2, "--per_device_train_batch_size", 2],
    "audio": ["run_audio", "--random_shift", 0.01, "--random_speed", 0.1, "--random_gain", 3, "--random_noise", 0.1],
    "images": [*IMAGES, "--crop_padding", 1, "--horizontal_flip", "true", "--label_smoothing_factor", 0.1],
    # These require timm.
    "images, timm": [*IMAGES, "--image_size", 32, "--auto_augment", "rand-m9-mstd0.5-inc1", "--random_erasing", 0.5,
                     "--mixup", 0.8, "--cutmix", 1.0],
    "images, repeated": [*IMAGES, "--repeated_augmentation", 2, "--mixup", 0.8],
    "lra": ["lra.run_lra", "--warmup_power", 2, "--warmup_steps", 4],
    "lra, pretrained": ["lra.run_lra", "--self_pretraining_steps", 2],
    "translation": [*TRANSLATION, "--clip_each", 0.1, "--max_grad_norm", 0, "--label_smoothing_factor", 0.1],
    "translation, milestones": [*TRANSLATION, "--model_type", "mega", "--config_overrides", MEGA, "--milestones", 4, 8,
                                "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 2],
}  # fmt: skip
FAST = ["glue", "clm, lengths and streaming", "clm, carried mega", "audio", "images"]


def logged(output: Path, after: int) -> list[dict]:
    """Return the log after a step, without times."""
    rows = [row for row in log_history(output) if row["step"] > after]
    return [{key: value for key, value in row.items() if not key.endswith(COSTS)} for row in rows]


def assert_equal(resumed: Path, complete: Path, after: int) -> None:
    """Check that weights and logs of two runs are equal."""
    weights = [load_file(output / "model.safetensors") for output in (resumed, complete)]
    assert [name for name in weights[1] if not torch.equal(weights[0][name], weights[1][name])] == []
    assert logged(resumed, after) == logged(complete, after)


@pytest.fixture
def train(train) -> Callable[..., Path]:
    """Return a function that trains with a checkpoint, and returns the output folder."""
    return lambda output, name, *options: train(output, name, *CUT, *options)


@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_resumed_run_equals_the_uninterrupted_run(train, case):
    if "--mixup" in CASES[case]:
        pytest.importorskip("timm")
    complete = train("complete", *CASES[case])
    resumed = train("resumed", *CASES[case], "--resume_from_checkpoint", complete / f"checkpoint-{SAVED}")
    assert steps(resumed) == STEPS
    assert_equal(resumed, complete, after=SAVED)


class RandomProcessor:
    """Mock of timm: a transform that draws numbers of all global generators."""

    @staticmethod
    def create_transform(*_, **__) -> Callable:
        return lambda image: torch.rand(1, 8, 8) + random.random() + np.random.rand()


def test_transforms_with_global_random_numbers(train, monkeypatch):
    monkeypatch.setattr("luna_mega.training.images._timm", lambda: RandomProcessor)
    options = [*IMAGES, "--auto_augment", "none"]
    complete = train("complete", *options)
    resumed = train("resumed", *options, "--resume_from_checkpoint", complete / f"checkpoint-{SAVED}")
    assert_equal(resumed, complete, after=SAVED)


def test_reseeded_examples_leave_the_global_generators_unchanged():
    class Examples:
        def __getitem__(self, index: int) -> tuple:
            return torch.rand(()).item(), random.random(), np.random.rand()

    split = Reseeded(Examples(), seed=1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = [split[0], split[1]]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert [random.getstate(), np.random.get_state()[1].tolist()] == [*states[1:]]
    assert [split[0], split[1]] == first and first[0] != first[1]
    split.set_epoch(1)
    assert all(again != before for again, before in zip(split[0], first[0], strict=True))


def test_checkpoint_at_the_end_of_an_epoch(train):
    """Logs and evaluations at the end of an epoch precede its checkpoint."""
    options = [*GLUE, "--do_eval", "--eval_strategy", "epoch", "--logging_strategy", "epoch", "--save_steps", 5]
    complete = train("complete", *options)
    resumed = train("resumed", *options, "--resume_from_checkpoint", complete / "checkpoint-5")
    assert_equal(resumed, complete, after=5)
    assert [row["step"] for row in logged(resumed, after=0) if "eval_loss" in row] == [5, 9, 9]


STOPPED = [*GLUE, "--do_eval", "--eval_strategy", "steps", "--eval_steps", 1, "--save_steps", 1, "--learning_rate", 0]
STOPPED += ["--load_best_model_at_end", "--early_stopping_patience", 4]


@pytest.mark.parametrize("saved", slow_but([3], [3, 5]))
def test_early_stopping_counts_all_evaluations(train, saved):
    """With a learning rate of 0, only the first evaluation is better than all before."""
    complete = train("complete", *STOPPED)
    resumed = train("resumed", *STOPPED, "--resume_from_checkpoint", complete / f"checkpoint-{saved}")
    assert steps(complete) == steps(resumed) == 5
    assert_equal(resumed, complete, after=saved if saved < 5 else 9)


def test_early_stopping_of_a_run_without(train):
    options = [option for option in STOPPED if option not in ("--early_stopping_patience", 4)]
    complete = train("complete", *options)
    checkpoint = complete / "checkpoint-3"
    resumed = train("resumed", *STOPPED, "--resume_from_checkpoint", checkpoint)
    assert steps(resumed) == 7  # the checkpoint has counted no evaluations


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
        (["--carry_state", "true", "--auto_find_batch_size", "true"], "--auto_find_batch_size is not supported with"),
    ):
        assert_error(train, message, "resumed", *options, *more)
    for file in checkpoint.glob("rng_state*"):  # as --save_only_model
        file.unlink()
    assert_error(train, "has no optimizer, because it was saved with --save_only_model", "resumed", *options)


def test_carried_state_is_required(train):
    options = CASES["clm, carried mega"]
    checkpoint = train("complete", *options) / f"checkpoint-{SAVED}"
    options = [*options, "--resume_from_checkpoint", checkpoint]
    assert_error(train, "--carry_state False: the checkpoint has a carried", "a", *options, "--carry_state", "false")
    (checkpoint / "run_state.pt").unlink()  # as in checkpoints of earlier versions
    assert_error(train, "--carry_state True: the checkpoint has no carried state", "b", *options)


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
    again = load_file(complete / "model.safetensors")
    assert_equal(train("complete", *options, *source), complete, after=6)
    weights = load_file(complete / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in again)
