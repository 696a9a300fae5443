"""Pretraining that is killed with `kill -9` at random points and resumed has the losses of an uninterrupted run."""

import random
import shutil

import pytest

from tests.distributed import killing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return killing.write_corpus(tmp_path_factory.mktemp("killed") / "corpus")


@pytest.fixture(scope="module")
def sharded(corpus, tmp_path_factory):
    """Losses of an uninterrupted run of two processes with a sharded model."""
    return killing.finish(2, corpus, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("point", range(1))
def test_one_of_two_processes_is_killed(point, corpus, sharded, tmp_path):
    """The other process exits with an error; one or two processes continue from the remaining checkpoint."""
    draw, killed = random.Random(point), tmp_path / "killed"
    step, delay = draw.randrange(1, killing.STEPS - 1), draw.uniform(0, 0.2)
    killing.kill_one(killing.launch(2, killing.options(corpus, killed)), killed, step, delay)
    for processes, tolerance in ((1, 1e-6), (2, 0)):
        resumed = shutil.copytree(killed, tmp_path / f"resumed-{processes}")
        assert killing.finish(processes, corpus, resumed) == pytest.approx(sharded, rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def complete(corpus, tmp_path_factory):
    """The losses of a run of Trainer that is not killed, and the seconds from its first checkpoint to its last."""
    output = tmp_path_factory.mktemp("complete")
    losses = killing.finish_trainer(corpus, output)
    times = [path.stat().st_mtime for path in output.glob("checkpoint-*/trainer_state.json")]
    return losses, (killing.STEPS - 2) / 2 * (max(times) - min(times))  # two checkpoints are kept


@pytest.mark.parametrize("point", range(2))
def test_a_run_of_trainer_is_killed(point, corpus, complete, tmp_path):
    """One process, with dropout and in bfloat16, killed between its first checkpoint and its end: bit for bit."""
    losses, seconds = complete
    draw, attempt = random.Random(point), 0
    while not killing.kill_trainer(corpus, tmp_path / str(attempt), draw.uniform(0, seconds)):
        attempt += 1  # it had ended already
    assert killing.finish_trainer(corpus, tmp_path / str(attempt)) == losses
