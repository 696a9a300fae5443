"""FSDP2 with every class, as accelerate and transformers wrap it, gives the losses and gradients of one process."""

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.distributed import cases
from tests.distributed.test_ddp import assert_equal


@pytest.mark.parametrize("names", [cases.A_FEW[1:3], pytest.param(cases.SHARDED, marks=cases.WEEKLY)])
def test_classes_train_as_on_one_process(ranks, names):
    results = ranks(2, cases.compare, names, cases.fsdp_of_accelerate, 2, (True,))
    assert_equal(results[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "names", "wrap"),
    [(2, cases.SOME, cases.fsdp_of_transformers), (4, cases.A_FEW[:2], cases.fsdp_of_accelerate)],
)
def test_plans_and_four_processes(ranks, processes, names, wrap):
    assert_equal(ranks(processes, cases.compare, names, wrap, 2, (False,))[0])


def wrapped_modules(name: str, wrap) -> list[str]:
    return [key for key, module in wrap(cases.make(name)).named_modules() if isinstance(module, FSDPModule)]


def test_wrapped_modules(ranks):
    name = "luna: ForTokenClassification"
    layers = [f"luna.encoder.layers.{index}" for index in range(2)]
    expected = ["", "luna.embeddings.word_embeddings", *layers]
    for wrap in (cases.fsdp_of_accelerate, cases.fsdp_of_transformers):
        assert ranks(2, wrapped_modules, name, wrap)[0] == expected
