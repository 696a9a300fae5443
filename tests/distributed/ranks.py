"""Processes that stay alive from test to test and run functions as the ranks of a gloo process group."""

import faulthandler
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# After this number of seconds without a response, a process counts as dead. A process that exits or fails is detected
# immediately. On a loaded machine, a process may not respond for many minutes, which must not fail a test.
PATIENCE = 1800


class Ranks:
    """Up to `most` processes; calling the object runs a function on the first `count` of them.

    Functions are defined at the top level of a test module; arguments and results are pickled. If a rank fails or hangs
    during a call, all processes are stopped, and the next call starts new ones.
    """

    def __init__(self, most: int = 4):
        self.most = most
        self.processes: list[multiprocessing.Process] = []
        self.pipes: list[Connection] = []

    def __call__(self, count: int, function: Callable, *arguments: Any, timeout: float = PATIENCE) -> list:
        """Run `function(*arguments)` on `count` ranks and return their results in the order of the ranks.

        Raises:
            AssertionError: if a rank raised an error, exited or did not respond for `timeout` seconds; the text is the
                traceback of the first such rank.
        """
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for rank, pipe in enumerate(self.pipes[:count]):
                pipe.send((rank, count, store, timeout, function, arguments))
            results = {}
            while len(results) < count:
                waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:count]) if rank not in results}
                ready = wait(waiting, timeout)
                if not ready:
                    self._fail(f"ranks {sorted(waiting.values())} said nothing for {timeout} s")
                for pipe in ready:
                    try:
                        fault, results[waiting[pipe]] = pipe.recv()
                    except EOFError:
                        process = self.processes[waiting[pipe]]
                        process.join(timeout)
                        fault = f"the process ended with exit code {process.exitcode}"
                    if fault is not None:
                        self._fail(f"rank {waiting[pipe]} of {count}: {fault}")
        return [results[rank] for rank in range(count)]

    def _start(self):
        if self.processes:
            return
        # One process imports the required modules, and the others are forked from it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.cases"])
        for _ in range(self.most):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(there,), daemon=True))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def _fail(self, reason: str):
        self.stop()
        raise AssertionError(reason)

    def stop(self):
        """Stop all processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def _serve(pipe: Connection):
    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        try:
            rank, count, store, timeout, function, arguments = pipe.recv()
        except EOFError:
            return
        # Accelerate and other libraries read these variables if no launcher has created a process group.
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        torch.manual_seed(0)
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
            )
            dist.barrier()  # a rank that exits immediately would close its sockets while others still connect
            answer = None, function(*arguments)
        except BaseException:
            answer = traceback.format_exc(), None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
