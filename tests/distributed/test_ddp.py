"""DDP with every class gives the losses and gradients of one process, without unused parameters or warnings."""

import os

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.big_modeling import _attach_context_parallel_hooks, _refuse_recurrent_layers_under_sequence_parallelism
from accelerate.state import AcceleratorState

from tests.distributed import cases

TOLERANCE = 1e-6


def assert_equal(results: dict):
    faults = {case: result for case, result in results.items() if max(result[:2]) > TOLERANCE or result[2]}
    assert results and not faults


@pytest.mark.parametrize(
    "names", [pytest.param(cases.SOME, marks=pytest.mark.slow), pytest.param([*cases.CASES], marks=cases.WEEKLY)]
)
def test_classes_train_as_on_one_process(ranks, names):
    assert_equal(ranks(2, cases.compare, names, cases.ddp, 2)[0])


@pytest.mark.slow
def test_four_processes(ranks):
    assert_equal(ranks(4, cases.compare, cases.A_FEW, cases.ddp, 2, (False,))[0])


def layerdrop_step(name: str, wrap) -> list[bool]:
    """Run two steps in which every process drops different layers; return whether all gradients are finite."""
    model = wrap(cases.make(name, layerdrop=0.5))
    torch.manual_seed(dist.get_rank())
    finite = []
    for step in range(2):
        complete = cases.batch(name, step)
        cases.loss_of(model, cases.own_rows(complete), complete).backward()
        grads = [cases.full_tensor(p.grad) for p in cases.unwrap(model).parameters() if p.requires_grad]
        finite.append(all(bool(grad.isfinite().all()) for grad in grads))
        model.zero_grad()
    return finite


LAYERDROP = ["luna: masked LM, tied", "luna: pooling packed_mean", "luna: seq2seq", "luna: causal LM"]


def layerdrop_steps(wrap) -> list[list[bool]]:
    return [layerdrop_step(name, wrap) for name in LAYERDROP]


@pytest.mark.parametrize("wrap", [cases.ddp, pytest.param(cases.fsdp_of_accelerate, marks=pytest.mark.slow)])
def test_layerdrop_leaves_no_parameter_without_a_gradient(ranks, wrap):
    assert ranks(2, layerdrop_steps, wrap) == [[[True, True]] * len(LAYERDROP)] * 2


def batch_norm_step() -> float:
    name = "mega: masked LM, synchronized batch norm"
    model = cases.ddp(cases.make(name, normalization_type="batchnorm"))
    complete = cases.batch(name, 0)
    for _ in range(2):  # the statistics of process 0 are broadcast at the next step
        cases.loss_of(model, cases.own_rows(complete), complete).backward()
    model.eval()
    with torch.no_grad():
        return float(model(**complete).loss)


def test_batch_norm_uses_the_rows_of_its_process(ranks):
    """A step normalizes by the rows of its process; DDP first broadcasts the running statistics of rank 0."""
    first, second = ranks(2, batch_norm_step)
    assert first == second


def empty_rank() -> str | None:
    complete = {name: value[:1] for name, value in cases.batch("luna: causal LM", 0).items()}
    rows = slice(dist.get_rank(), dist.get_rank() + 1)
    try:
        cases.ddp(cases.make("luna: causal LM"))(**{name: value[rows] for name, value in complete.items()})
    except ValueError as error:
        return str(error)


def test_process_without_rows_raises(ranks):
    first, second = ranks(2, empty_rank)
    assert first is None and "the batch is empty: 0 sequences" in second


def accelerate_small_data() -> list[float]:
    """Train on one row with accelerate, which passes the row to every process."""
    # required but unused, because the process group exists
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    complete = cases.batch("mega: causal LM", 0)
    rows = [{name: value[0] for name, value in complete.items()}]
    model = cases.make("mega: causal LM")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=1))
    losses = []
    for inputs in loader:
        loss = model(**inputs).loss
        accelerator.backward(loss)
        losses.append(float(loss.detach()))
    return losses


def test_more_processes_than_rows_with_accelerate(ranks):
    first, second = ranks(2, accelerate_small_data)
    assert len(first) == 1 and first == second


@pytest.mark.parametrize("name", cases.CLASSES)
def test_every_class_rejects_ddp_across_the_sequence(name):
    model = cases.make(name)
    for hook in (_attach_context_parallel_hooks, _refuse_recurrent_layers_under_sequence_parallelism):
        with pytest.raises(ValueError, match="set cp_size and sp_size to 1"):
            hook(model)
    assert not model.supports_context_parallel
