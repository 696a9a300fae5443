"""The process of a section of the report: it works through cases and sends their rows as they come."""

import gc
import os
import sys
import time


def work(pipe, section: str, share: tuple[int, int], done: int, toy: bool, output: str) -> None:
    """Send ("begin", case, None) and ("rows", case, rows) for each case of a share, behind the first `done` ones."""
    os.setsid()
    with open(os.path.join(output, "log.txt"), "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # One process compiles for itself: the others have the other processors.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Imported here, because the process that starts this one must neither load nor interpret the kernels.
    import torch
    from gpu import checks, timings

    setting = checks.Setting(torch.device("cpu" if toy else "cuda"), toy, output)
    maker = getattr(checks, section, None) or getattr(timings, section)
    pipe.recv()
    cases = list(maker(setting))[share[0] :: share[1]][done:]
    pipe.send(("cases", None, [name for name, _ in cases]))
    for name, case in cases:
        print(f"== {section}: {name}", flush=True)
        pipe.send(("begin", name, None))
        start = time.perf_counter()
        try:
            rows = case()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            rows = [{"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}", "ok": False}]
        if not toy:
            rows += _lost_context(torch)
        seconds = round(time.perf_counter() - start, 2)
        rows = [{"seconds": 0 if number else seconds} | row for number, row in enumerate(rows)]
        pipe.send(("rows", name, rows))
        if rows and rows[-1].get("lost"):
            os._exit(1)
        if "torch._dynamo" in sys.modules:  # its import is slow
            torch._dynamo.reset()
        gc.collect()
        if not toy:
            torch.cuda.empty_cache()
    pipe.send(("end", None, None))
    os._exit(0)  # there is nothing to tidy up, which takes torch a while


def _lost_context(torch):
    """Return a row if the CUDA context has not survived a case, after which another process goes on."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        told = str(error).strip().partition("\n")[0][:300]
        return [{"error": f"the CUDA context is lost: {told}", "ok": False, "lost": True}]
    return []
