"""`vllm serve DIR` without options: answers to simultaneous requests equal `generate`, or are errors."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; make test-vllm has an environment with it")
import openai  # noqa: E402
import psutil  # noqa: E402

pytestmark = pytest.mark.slow
COUNT, AT_ONCE, MOST, LONG = 200, 20, 12, "x" * 600
KINDS = ["plain"] * 11 + ["stream"] * 5 + ["cut"] * 2 + ["long", "garbled"]


@contextmanager
def serving(folder: str, plugins: Path):
    """Serve a folder and yield the port and the process; after the block, it must stop on SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | environment(plugins))
    try:
        deadline = time.monotonic() + 900
        while not is_ready(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)  # vLLM then stops its own processes
        try:
            status = process.wait(60)
        finally:
            process.kill()
    assert status == 0


def is_ready(port: int) -> bool:
    try:
        return send(port, "/health")[0] == 200
    except OSError:
        return False


def environment(plugins: Path) -> dict[str, str]:
    """Return the environment variables of a server.

    On a CPU, a vLLM plugin in the folder `plugins` defines missing operators.
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        plugin = plugins / "vllm_cpu-0.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0\n", encoding="utf-8")
        (plugin / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nvllm_cpu = vllm_cpu:register\n", encoding="utf-8"
        )
        paths = [str(plugins), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


def send(port: int, path: str, body: bytes | None = None) -> tuple[int, str]:
    """Return the status and the content of a response; a request with a body is a POST."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def draw_requests(complete, family: str) -> list[dict]:
    """Return requests with their expected results: a text, or None for an error."""
    chosen, letters = random.Random(0), [chr(code) for code in range(33, 127)]
    prompts = []
    for _ in range(30):
        prompt, count = "".join(chosen.choices(letters, k=chosen.randint(1, 60))), chosen.randint(2, MOST)
        prompts.append({"prompt": prompt, "max_tokens": count, "expected": complete(family, prompt, count)})
    assert len({request["expected"] for request in prompts}) > 20
    # Luna has 512 positions. Mega and Megalodon have no limit, although `max_positions` of this Mega is 512.
    expected = None if family == "luna" else complete(family, LONG, MOST)
    long = {"prompt": LONG, "max_tokens": MOST, "expected": expected}
    kinds = [KINDS[number % len(KINDS)] for number in range(COUNT)]
    requests = [(long if kind == "long" else chosen.choice(prompts)) | {"kind": kind} for kind in kinds]
    chosen.shuffle(requests)
    return [long | {"kind": "long"}] * AT_ONCE + requests  # the first step has the maximum number of tokens


def check_answer(client: openai.OpenAI, port: int, path: str, request: dict) -> str | None:
    """Send a request; return an error message if the answer is wrong, otherwise None."""
    kind, expected = request["kind"], request["expected"]
    options = {"model": path, "prompt": request["prompt"], "max_tokens": request["max_tokens"], "temperature": 0}
    if kind == "garbled":
        status, _ = send(port, "/v1/completions", json.dumps(options).encode()[:-3])
        return None if status in (400, 422) else f"bad JSON gets {status}"
    if expected is None:
        try:
            client.completions.create(**options)
        except openai.BadRequestError:
            return None
        return "a prompt that is too long gets an answer"
    if kind in ("plain", "long"):
        text = client.completions.create(**options).choices[0].text
    else:
        chunks = client.completions.create(**options | ({"max_tokens": 200} if kind == "cut" else {}), stream=True)
        if kind == "cut":
            text = next(iter(chunks)).choices[0].text
            chunks.close()
            return None if expected.startswith(text) or text.startswith(expected) else "cut off"
        text = "".join(chunk.choices[0].text for chunk in chunks)
    return None if text == expected else f"{text!r} instead of {expected!r}"


def resources(process) -> tuple[int, int, int]:
    """Return the memory in bytes and the numbers of open files and threads of a server and its child processes."""
    own = psutil.Process(process.pid)
    every = [own, *own.children(recursive=True)]
    return sum(p.memory_info().rss for p in every), sum(p.num_fds() for p in every), sum(p.num_threads() for p in every)


def metrics(port: int) -> dict[str, float]:
    """Return the metrics of vLLM about requests in progress."""
    lines = (line for line in send(port, "/metrics")[1].splitlines() if line.startswith("vllm:"))
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: float(line.split()[-1]) for line in lines for name in names if line.startswith(f"vllm:{name}{{")}


@pytest.mark.parametrize("family", ["mega", "megalodon", "luna"])
def test_answers_equal_generate_and_resources_are_released(family, folder, complete, tmp_path):
    path, requests = folder(family), draw_requests(complete, family)
    with serving(path, tmp_path) as (port, process):

        def run():
            address = f"http://127.0.0.1:{port}/v1"
            client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
            with client, ThreadPoolExecutor(AT_ONCE) as pool:
                assert [model.id for model in client.models.list().data] == [path]
                wrong = [w for w in pool.map(lambda r: check_answer(client, port, path, r), requests) if w]
                # runs after the canceled requests have ended
                client.completions.create(model=path, prompt="x", max_tokens=1)
            time.sleep(2.0)  # waits until connections are closed
            return wrong, resources(process)

        wrong, before = run()  # the first run includes one-time allocations
        again, after = run()
        assert not wrong + again
        assert after[0] < before[0] + 8 * 2**20, (before, after)
        assert after[1] <= before[1] and after[2] <= before[2], (before, after)
        left = metrics(port)
        assert len(left) == 3 and not any(left.values())
