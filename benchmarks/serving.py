"""Serving: tokens a second and memory of Mega, Megalodon and Luna in vLLM and in transformers, beside Llama.

    make test-serving                                   # once: makes the environment
    export VLLM_TARGET_DEVICE=cpu VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=2 PYTHONPATH=.:tests/serving
    OMP_NUM_THREADS=1 .venv-serving/bin/python benchmarks/serving.py --engine vllm --models mega --processor-time
    OMP_NUM_THREADS=1 .venv-serving/bin/python benchmarks/serving.py --engine transformers --models mega llama

Models are those of `decoding.py`, with random weights, of about 24 million parameters. `--requests` prompts come at the
same time, and each is continued greedily by 16 tokens; in vLLM by more, if it still reads other prompts meanwhile. A
prompt has `--contexts` tokens and half a chunk, so that chunks of attention are as full as they are on average. "Read"
are the tokens of all prompts a second until every request has its first one; "written" are the tokens of all answers a
second, from the median of the steps in which every request gets one.

transformers reads prompts in one call of `generate`. Where prompts have more than `--most` tokens together, it gets a
cache in their place, filled as in `decoding.py`, and nothing is read. vLLM always reads. "Held" is the memory that the
states, or keys and values, of all requests take, and "peak" the largest resident memory of the process in that row.
With `--processor-time` a second is one of the processor, in which nobody else used it; this is for one thread.

With `--hold` the table has, in place of speeds, the slots of vLLM that all requests take while all of them write. They
share a prompt but for its last token, so that vLLM, with its prefix cache, reads it once. "Held" is then the memory of
these slots.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import prod

import torch
from decoding import CHUNK, LONGEST_PROMPT, MODELS, VOCABULARY, fill, state_bytes
from measure import peak, reset_peak
from transformers import PreTrainedModel, StoppingCriteria, logging

from luna_mega.compat import CACHE_NAME

NEW, BUDGET = 16, 2048  # tokens that all requests get together, and that vLLM reads in a step
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Stamps(StoppingCriteria):
    """Notes the time behind every token, and stops nothing."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.times = clock, [clock()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        self.times.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def in_transformers(
    model: PreTrainedModel, clock: Callable[[], float], context: int, requests: int, most: int
) -> tuple[float | None, float, int]:
    """Return the seconds to read the prompts (None = they were not), those of a step, and the bytes that are held."""
    past = fill(model, requests, context) if context * requests > most else None
    prompts = torch.randint(3, VOCABULARY, (requests, context if past is None else past.get_seq_length() + 1))
    stamps = Stamps(clock)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "stopping_criteria": [stamps]}
    options |= {"attention_mask": torch.ones_like(prompts), "return_dict_in_generate": True}
    output = model.generate(prompts, **options, **{CACHE_NAME: past})
    first, *steps = (end - begin for begin, end in itertools.pairwise(stamps.times))
    return first if past is None else None, statistics.median(steps), state_bytes(output[CACHE_NAME])


class VllmServer:
    """vLLM with a model, in this process."""

    def __init__(self, model: PreTrainedModel, folder: str, longest: int, dtype: str, requests: int, shared: bool):
        from vllm import LLM

        from luna_mega.serving.families import FAMILIES

        if os.environ.get("VLLM_TARGET_DEVICE") == "cpu" and find_spec("vllm_cpu"):  # in tests/serving
            import vllm_cpu

            vllm_cpu.register()
        family = FAMILIES[type(model).__name__]
        kinds = zip(family.state_shapes(model.config), family.state_dtypes(DTYPES[dtype]), strict=True)
        self.held = model.config.num_hidden_layers * sum(prod(shape) * kind.itemsize for shape, kind in kinds)
        options = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": dtype, "max_model_len": longest}
        options |= {"enable_prefix_caching": shared, "max_num_seqs": requests, "max_num_batched_tokens": BUDGET}
        options |= {"block_size": CHUNK // 2} if shared else {}
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # Mega's max_positions is no limit where it has chunks
        self.engine = LLM(folder, generation_config="vllm", **options).llm_engine

    def measure(self, clock: Callable[[], float], context: int, requests: int) -> tuple[float, float, int]:
        """Return the seconds to read the prompts, those of a step, and the bytes that are held."""
        from vllm import SamplingParams

        count = NEW + context * requests // BUDGET + requests
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for number in range(requests):
            prompt = {"prompt_token_ids": torch.randint(3, VOCABULARY, (context,)).tolist()}
            self.engine.add_request(f"{context}-{requests}-{number}", prompt, sampling)
        written, steps, read, begin = {}, [], 0.0, clock()
        while self.engine.has_unfinished_requests():
            start = clock()
            outputs = self.engine.step()
            end, before = clock(), len(written)
            written |= {output.request_id: output.finished for output in outputs}
            if len(written) == requests and before < requests:
                read = end - begin
            elif len(written) == requests and not any(written.values()):
                steps.append(end - start)
        return read, statistics.median(steps), requests * self.held

    def hold(self, context: int, requests: int) -> tuple[int, int, int]:
        """Return how many slots the requests take while all of them write, the bytes of one, and those of all."""
        from vllm import SamplingParams

        manager = self.engine.engine_core.engine_core.scheduler.kv_cache_manager
        pool, sizes = manager.block_pool, manager.kv_cache_config
        shared, ends = torch.randint(3, VOCABULARY, (context,)).tolist(), torch.randperm(VOCABULARY).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        before, written = pool.get_num_free_blocks(), set()
        for number in range(requests):
            prompt = {"prompt_token_ids": [*shared, ends[number]]}
            self.engine.add_request(f"{context}-{number}", prompt, sampling)
            while not written:  # the first request reads what the others share
                written |= {output.request_id for output in self.engine.step()}
        while len(written) < requests:
            written |= {output.request_id for output in self.engine.step()}
        if self.engine.get_num_unfinished_requests() < requests:
            raise RuntimeError("a request was done before the last one began")
        slots = before - pool.get_num_free_blocks()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        size = sum(tensor.size for tensor in sizes.kv_cache_tensors) // sizes.num_blocks
        return slots, size, slots * size


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=["vllm", "transformers"], required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mega", "megalodon", "luna"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--most", type=int, default=20000, help="tokens of prompts that transformers reads together")
    parser.add_argument("--hold", action="store_true", help="measure the slots of vLLM alone, with a shared prompt")
    parser.add_argument("--processor-time", action="store_true", help="measure on a core that others use as well")
    options = parser.parse_args(arguments)
    clock = time.process_time if options.processor_time else time.perf_counter
    others = {"llama", "gpt2"} & set(options.models)
    if options.engine == "vllm" and (others or len(options.models) > 1):
        parser.error("vLLM serves one of mega, megalodon and luna in a process: give one of them")
    if options.hold and options.engine != "vllm":
        parser.error("--hold is for the slots of vLLM: leave it out")
    logging.set_verbosity_error()
    torch.manual_seed(0)
    longest = max(*options.contexts, LONGEST_PROMPT) + CHUNK + 2 * NEW + max(options.contexts) * 8 // BUDGET
    columns = "slots | a slot, MiB" if options.hold else "read, tokens/s | written, tokens/s"
    print(f"| engine | model | requests | context | {columns} | held, MiB | peak, MiB |\n|{'---|' * 8}")
    for name in options.models:
        build, inner = MODELS[name]
        model, server = build(inner, longest), None
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = type(model).from_pretrained(folder, dtype=options.dtype).eval()
            if options.engine == "vllm":
                server = VllmServer(model, folder, longest, options.dtype, max(options.requests), options.hold)
        for requests, context in itertools.product(options.requests, options.contexts):
            reset_peak("cpu")
            length = context + CHUNK // 2
            if options.hold:
                slots, size, held = server.hold(length, requests)
                measured = f"{slots} | {size / 2**20:.2f}"
            else:
                run = partial(in_transformers, model, most=options.most) if server is None else server.measure
                first, step, held = run(clock, length, requests)
                read = "-" if first is None else f"{requests * length / first:,.0f}"
                measured = f"{read} | {requests / step:.1f}"
            sizes = f"{held / 2**20:.1f} | {peak('cpu') / 2**20:,.0f}"
            print(f"| {options.engine} | {name} | {requests} | {context:,} | {measured} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
