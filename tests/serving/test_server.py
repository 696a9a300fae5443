"""`luna-mega serve` with the server of transformers: asked by the `openai` client over the loopback address."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from transformers.utils.import_utils import is_serve_available

openai = pytest.importorskip("openai", reason="openai is not installed; make test-serving has an environment with it")
if not is_serve_available():
    pytest.skip("the server of transformers is not installed; see make test-serving", allow_module_level=True)

pytestmark = pytest.mark.slow
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = {"prompt": "Hello world", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(served, tokenizer, tmp_path_factory):
    def save(family, template=None):
        path = tmp_path_factory.mktemp(family)
        model, _ = served(family, 6)
        model.generation_config.do_sample = False
        model.save_pretrained(path)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
        tokenizer.chat_template = None
        return str(path)

    return save


@contextmanager
def serving(folder, *options):
    """Serve a folder, and give its port; at the end the server is told to end, and must."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "import sys, luna_mega_cli; sys.exit(luna_mega_cli.main())"
    process = subprocess.Popen([sys.executable, "-c", code, "serve", folder, "--port", str(port), *options])
    try:
        for _ in range(240):
            assert process.poll() is None
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


def client_of(port, key="none"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


def status_of(port, body: bytes) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("family", ["mega", "luna"])
def test_completions_and_what_is_at_fault(family, folder, served, tokenizer):
    path = folder(family)
    ids = tokenizer(PROMPT["prompt"], return_tensors="pt").input_ids
    with torch.no_grad():
        text = served(family, 6)[0].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )
    expected = tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True)
    with serving(path) as port:
        client = client_of(port)
        assert [model.id for model in client.models.list().data] == [path]
        assert client.completions.create(model=path, **PROMPT).choices[0].text == expected
        chunks = client.completions.create(model=path, **PROMPT, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model=path, messages=[{"role": "user", "content": "Hello"}])
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.responses.create(model=path, input="Hello")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="another", **PROMPT)
        assert status_of(port, b"{ no JSON") == 422
        cut = client.completions.create(model=path, prompt="Hello", max_tokens=200, stream=True)
        next(iter(cut))
        cut.close()
        assert status_of(port, json.dumps({"model": path, **PROMPT}).encode()) == 200


def test_chat_key_and_limit(folder):
    path = folder("mega", TEMPLATE)
    with serving(path, "--key", "secret", "--max-requests", "2") as port:
        with client_of(port) as stranger, pytest.raises(openai.AuthenticationError, match="wants a key"):
            stranger.models.list()
        with client_of(port, "secret") as client:
            ask = {"model": path, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            assert client.chat.completions.create(**ask).choices[0].message.role == "assistant"
            answer = client.responses.create(model=path, input="Hello", max_output_tokens=4, stream=False)
            assert answer.object == "response"
        place = ("127.0.0.1", port)
        with socket.create_connection(place), socket.create_connection(place):  # which ask nothing yet
            time.sleep(0.5)
            assert status_of(port, b"{}") == 503
        time.sleep(0.5)
        assert status_of(port, b"{}") == 401
