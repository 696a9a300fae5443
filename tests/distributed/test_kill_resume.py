"""Pretraining that is killed with `kill -9` at random points and resumed has the losses of an uninterrupted run."""

import random
import shutil

import pytest

from tests.distributed import killing

pytestmark = pytest.mark.slow
DROPOUT = ("--bf16", "true", "--config_overrides", killing.MODEL.replace("dropout_prob=0.0", "dropout_prob=0.1"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return killing.write_corpus(tmp_path_factory.mktemp("killed") / "corpus")


@pytest.fixture(scope="module")
def complete(corpus, tmp_path_factory):
    """Return a function of the run that is not killed: its losses, and the seconds from its first checkpoint."""
    runs = {}

    def run(processes, *options):
        if processes not in runs:
            output = tmp_path_factory.mktemp("complete")
            losses = killing.finish(processes, corpus, output, *options)
            times = [path.stat().st_mtime for path in output.glob("checkpoint-*/trainer_state.json")]
            runs[processes] = losses, (killing.STEPS - 2) / 2 * (max(times) - min(times))  # two checkpoints are kept
        return runs[processes]

    return run


def killed(point, processes, corpus, folder, seconds, *options):
    """Return the output folder of a run that was killed at a random moment."""
    draw, attempt = random.Random(point), 0
    while not killing.kill(processes, corpus, folder / str(attempt), draw.uniform(0, seconds), *options):
        attempt += 1  # the run had ended already
    return folder / str(attempt)


@pytest.mark.parametrize("point", range(2))
def test_a_run_is_killed(point, corpus, complete, tmp_path):
    """One process, with dropout and in bfloat16: bit for bit."""
    losses, seconds = complete(1, *DROPOUT)
    output = killed(point, 1, corpus, tmp_path, seconds, *DROPOUT)
    assert killing.finish(1, corpus, output, *DROPOUT) == losses


def test_one_of_two_processes_is_killed(corpus, complete, tmp_path):
    """The other process exits with an error; one or two processes continue from the last complete checkpoint."""
    losses, seconds = complete(2)
    output = killed(0, 2, corpus, tmp_path, seconds)
    for processes, tolerance in ((1, 1e-6), (2, 0)):
        resumed = shutil.copytree(output, tmp_path / f"resumed-{processes}")
        assert killing.finish(processes, corpus, resumed) == pytest.approx(losses, rel=0, abs=tolerance)
