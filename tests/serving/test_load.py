"""Servers under load: 500 requests, 20 at a time, some invalid or canceled. Every answer is correct or an error."""

import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from transformers.utils.import_utils import is_serve_available

openai = pytest.importorskip("openai", reason="openai is not installed; make test-serving has an environment with it")
psutil = pytest.importorskip("psutil", reason="psutil is not installed; make test-serving has an environment with it")

from tests.serving.loopback import client_of, serving, status_of, vllm_environment  # noqa: E402

pytestmark = pytest.mark.slow
COUNT, AT_ONCE, MOST = 500, 20, 12
ENGINES = {
    # Luna has 512 positions.
    "transformers": ("luna", (), is_serve_available()),
    "vllm": ("mega", ("--engine", "vllm", "--max-length", "512"), find_spec("vllm") is not None),
}


def draw_requests(complete, family: str) -> list[dict]:
    """Return requests with the expected result of each: a text or an error."""
    chosen, letters = random.Random(0), [chr(code) for code in range(33, 127)]
    prompts = []
    for _ in range(30):
        prompt, count = "".join(chosen.choices(letters, k=chosen.randint(1, 60))), chosen.randint(2, MOST)
        prompts.append({"prompt": prompt, "max_tokens": count, "expected": complete(family, prompt, count)})
    assert len({request["expected"] for request in prompts}) > 20
    kinds = ["plain"] * 11 + ["stream"] * 5 + ["cut"] * 2 + ["long", "garbled"]
    requests = [chosen.choice(prompts) | {"kind": kinds[number % len(kinds)]} for number in range(COUNT)]
    chosen.shuffle(requests)
    return requests


def send(client, port: int, path: str, request: dict) -> str | None:
    """Return an error message if the answer is wrong, otherwise None."""
    kind, prompt, count = request["kind"], request["prompt"], request["max_tokens"]
    options = {"model": path, "prompt": prompt, "max_tokens": count, "temperature": 0}
    if kind == "garbled":
        status = status_of(port, json.dumps(options).encode()[:-3])
        return None if status in (400, 422) else f"bad JSON gets {status}"
    if kind == "long":
        try:
            client.completions.create(**options | {"prompt": "x" * 600})
        except openai.BadRequestError:
            return None
        return "a prompt that is too long gets an answer"
    if kind == "plain":
        text = client.completions.create(**options).choices[0].text
    else:
        chunks = client.completions.create(**options | {"max_tokens": 200 if kind == "cut" else count}, stream=True)
        if kind == "cut":
            text = next(iter(chunks)).choices[0].text
            chunks.close()
            return None if request["expected"].startswith(text) or text.startswith(request["expected"]) else "cut off"
        text = "".join(chunk.choices[0].text for chunk in chunks)
    return None if text == request["expected"] else f"{text!r} instead of {request['expected']!r}"


def belongings(process) -> tuple[int, int, int]:
    """Return memory in bytes, open files and threads of a server and its child processes."""
    own = psutil.Process(process.pid)
    every = [own, *own.children(recursive=True)]
    return sum(p.memory_info().rss for p in every), sum(p.num_fds() for p in every), sum(p.num_threads() for p in every)


def vllm_metrics(port: int) -> dict[str, float]:
    """Return the metrics of vLLM about requests in progress."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    lines = (line for line in text.splitlines() if line.startswith("vllm:"))
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: float(line.split()[-1]) for line in lines for name in names if line.startswith(f"vllm:{name}{{")}


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_correct_and_resources_are_released(engine, folder, complete, tmp_path):
    family, options, is_there = ENGINES[engine]
    if not is_there:
        pytest.skip(f"{engine} cannot serve here; make test-serving has an environment with it")
    path, requests = folder(family), draw_requests(complete, family)
    environment = vllm_environment(tmp_path) if engine == "vllm" else None
    with serving(path, *options, environment=environment) as (port, process):

        def run(requests):
            with client_of(port) as client, ThreadPoolExecutor(AT_ONCE) as pool:
                wrong = [result for result in pool.map(lambda r: send(client, port, path, r), requests) if result]
                client.completions.create(model=path, prompt="x", max_tokens=1)  # after the canceled requests
            time.sleep(2.0)  # connections close
            return wrong, belongings(process)

        wrong, before = run(requests[:100])  # warms up, so one-time allocations are included
        again, after = run(requests[100:])
        assert not wrong + again
        assert after[0] < before[0] + 8 * 2**20, (before, after)
        assert after[1] <= before[1] and after[2] <= before[2], (before, after)
        if engine == "vllm":
            left = vllm_metrics(port)
            assert len(left) == 3 and not any(left.values())
