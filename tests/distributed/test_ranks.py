"""The processes in which other tests run ranks, and the timeouts of all tests that wait for processes."""

import ast
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import PATIENCE


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, message", [(fail_on_one, "this rank fails"), (end_on_one, "the process ended with exit code 3")]
)
def test_failure_is_reported_and_the_next_call_works(ranks, function, message):
    with pytest.raises(AssertionError, match=f"(?s)rank . of 2.*{message}|Connection (closed|reset)"):
        ranks(2, function)
    assert ranks(2, add_ranks, 0) == [(0, 2, 1), (1, 2, 1)]


def test_every_wait_is_patient(repo_root):
    """All timeouts are at least `PATIENCE`, so that a test does not fail because a process is slow."""
    waits = {"run", "call", "check_call", "check_output", "communicate", "wait", "result", "get", "ranks", "join"}
    hasty = []
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((repo_root / "tests").rglob("*.py"))}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)) if "timeout=" in source else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in waits:
                limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
                if any(isinstance(limit, ast.Constant) and limit.value < PATIENCE for limit in limits):
                    hasty.append(f"{path.relative_to(repo_root)}:{node.lineno}")
    assert not hasty
