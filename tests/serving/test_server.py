"""`luna-mega serve` with the server of transformers: asked by the `openai` client over the loopback address."""

import json
import socket
import time

import pytest
from transformers.utils.import_utils import is_serve_available

openai = pytest.importorskip("openai", reason="openai is not installed; make test-serving has an environment with it")
if not is_serve_available():
    pytest.skip("the server of transformers is not installed; see make test-serving", allow_module_level=True)

from tests.serving.loopback import client_of, serving, status_of  # noqa: E402

pytestmark = pytest.mark.slow
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = {"prompt": "Hello world", "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize("family", ["mega", "megalodon", "luna"])
def test_completions_and_what_is_at_fault(family, folder, complete):
    path = folder(family)
    expected = complete(family, PROMPT["prompt"], PROMPT["max_tokens"])
    with serving(path) as (port, _):
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
    with serving(path, "--key", "secret", "--max-requests", "2") as (port, _):
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
