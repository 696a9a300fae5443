"""The processes that other tests run ranks in."""

import os
import time

import pytest
import torch
import torch.distributed as dist


def add_ranks(start: int) -> tuple[int, int, int]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("this rank fails")
    dist.barrier()


def end_on_one():
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_in_the_order_of_the_ranks(ranks, count):
    total = 10 * count + sum(range(count))
    assert ranks(count, add_ranks, 10) == [(rank, count, total) for rank in range(count)]


@pytest.mark.parametrize("function, message", [(fail_on_one, "this rank fails"), (end_on_one, "the process ended")])
def test_a_failure_is_told_and_the_next_call_works(ranks, function, message):
    with pytest.raises(AssertionError, match=f"(?s)rank . of 2.*{message}|Connection (closed|reset)"):
        ranks(2, function)
    assert ranks(2, add_ranks, 0) == [(0, 2, 1), (1, 2, 1)]
