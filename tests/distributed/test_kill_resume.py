"""Pretraining that is killed with `kill -9` at random points and resumed has the losses of an uninterrupted run."""

import random

import pytest

from tests.distributed import killing

pytestmark = pytest.mark.slow
DROPOUT = ("--bf16", "auto", "--config_overrides", killing.MODEL.replace("dropout_prob=0.0", "dropout_prob=0.1"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return killing.write_corpus(tmp_path_factory.mktemp("killed") / "corpus")


def losses_of_a_killed_run(ranks, processes, corpus, folder, *options):
    """Return the losses of an uninterrupted run, and of a run that was killed at a random time and resumed."""
    complete = killing.finish(ranks, processes, corpus, folder / "complete", *options)
    draw = random.Random(processes)
    step, delay = draw.randrange(4, killing.STEPS - 8, 2), draw.uniform(0, 0.1)
    killing.kill(processes, corpus, folder / "killed", step, delay, *options)
    return complete, killing.finish(ranks, processes, corpus, folder / "killed", *options)


def test_a_run_is_killed(ranks, corpus, tmp_path):
    """Losses of a resumed run of one process, with dropout, are equal bit for bit, also in bfloat16."""
    complete, resumed = losses_of_a_killed_run(ranks, 1, corpus, tmp_path, *DROPOUT)
    assert resumed == complete


def test_one_of_two_processes_is_killed(ranks, corpus, tmp_path):
    """If one process is killed, the other one exits with an error, and both resume from the last complete checkpoint.

    `test_scripts.py` resumes on another number of processes.
    """
    complete, resumed = losses_of_a_killed_run(ranks, 2, corpus, tmp_path)
    assert resumed == complete
