"""Compile the configurations that tuning may select for an H100, without a GPU, and check that they fit its memory.

A script like `aot.py`: `TRITON_INTERPRET=0 python tests/kernels/aot_candidates.py [part of the name of a case ...]`.
It skips the defaults, which `aot.py` compiles. The exit status is 1 if a configuration needs more shared memory than a
block can have; remove such a configuration from the list of its kernel.
"""

import importlib
import sys

import aot

from luna_mega.kernels.common import triton_choice, triton_launch

ARCH = 90


def run_first(kernel, key, configurations, run):
    return run(configurations[0])


def run_all(kernel, key, configurations, run):
    return [run(configuration) for configuration in configurations][0]


def main(words: list[str]) -> int:
    too_large = seen = 0
    for op in aot.OPS:
        for case, run in importlib.import_module(f"aot_{op}").cases():
            if words and not any(word in f"{op} {case}" for word in words):
                continue
            compiled = set()
            for every in (run_first, run_all):
                with triton_launch.recording(aot.TARGETS[ARCH]) as launches, triton_choice.choosing(every):
                    run()
                for launch in launches:
                    key, compile_it = aot.compile_launch(launch, ARCH)
                    if every is run_all and key not in compiled:
                        shared, seen = compile_it().metadata.shared, seen + 1
                        fits = shared + 1024 <= aot.TARGETS[ARCH].shared_memory  # the driver reserves 1 KB
                        too_large += not fits
                        print(
                            f"{op} {case}: {launch.kernel.fn.__name__} {launch.num_warps} warps, {shared} bytes", fits
                        )
                    compiled.add(key)
    print(f"{seen} configurations, {too_large} of them too large")
    return 1 if too_large or not seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
