"""`luna-mega serve` in separate processes, and requests to it over the loopback address."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import openai

_SERVE = "import sys, luna_mega_cli; sys.exit(luna_mega_cli.main())"


@contextmanager
def serving(folder, *options, environment=None):
    """Serve a folder and yield the port and the process, which must stop on SIGTERM after the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _SERVE, "serve", folder, "--port", str(port), *options]
    process = subprocess.Popen(command, env=os.environ | (environment or {}))
    try:
        for _ in range(1200):
            assert process.poll() is None
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)  # vLLM then stops its own processes
        try:
            status = process.wait(60)
        finally:
            process.kill()
    assert status == 0


def vllm_environment(path: Path) -> dict[str, str]:
    """Return the environment of a vLLM server; on a CPU, a plugin in this folder defines missing operators."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        plugin = path / "vllm_cpu-0.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_cpu = vllm_cpu:register\n")
        paths = [str(path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def client_of(port, key="none"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=120)


def send(port, path, body: bytes | None = None, headers: dict | None = None) -> tuple[int, bytes]:
    """Return the status and the content of a response; a request with a body is a POST."""
    headers = {"content-type": "application/json"} | (headers or {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def status_of(port, body: bytes) -> int:
    return send(port, "/v1/completions", body)[0]
