"""`luna-mega serve` with the server of transformers, called by the `openai` client and by raw requests on loopback."""

import json
import signal
import socket
import time

import pytest
from transformers.utils.import_utils import is_serve_available

openai = pytest.importorskip("openai", reason="openai is not installed; make test-serving has an environment with it")
if not is_serve_available():
    pytest.skip("the server of transformers is not installed; see `make test-serving`", allow_module_level=True)

from tests.serving.loopback import client_of, send, serving, status_of  # noqa: E402
from tests.serving.test_requests import TEXTS, VALID, malformed  # noqa: E402

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] + (message['tool_call_id'] or '') }}{% endfor %}"
    "{% for tool in tools or [] %}{{ '' + tool['function']['name'] }}{% endfor %}{{ 1 // (divisor or 1) }}"
)
PROMPT = {"prompt": "Hello world", "max_tokens": 8, "temperature": 0}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}


@pytest.mark.parametrize("family", ["mega", "megalodon", "luna"])
def test_completions_and_errors(family, folder, complete):
    path = folder(family)
    expected = complete(family, PROMPT["prompt"], PROMPT["max_tokens"])
    with serving(path) as (port, _):
        client = client_of(port)
        assert [model.id for model in client.models.list().data] == [path]
        answer = client.completions.create(model=path, **PROMPT)
        assert answer.choices[0].text == expected and answer.model == path
        chunks = list(client.completions.create(model=path, **PROMPT, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert {chunk.model for chunk in chunks} == {path}
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model=path, messages=[{"role": "user", "content": "Hello"}])
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.responses.create(model=path, input="Hello")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="another", **PROMPT)
        cut = client.completions.create(model=path, prompt="Hello", max_tokens=200, stream=True)
        next(iter(cut))
        cut.close()
        assert status_of(port, json.dumps({"model": path, **PROMPT}).encode()) == 200


def test_chat_key_and_limit(folder):
    path = folder("mega", TEMPLATE)
    with serving(path, "--key", "secret", "--max-requests", "2") as (port, _):
        with client_of(port) as stranger, pytest.raises(openai.AuthenticationError, match="no valid key"):
            stranger.models.list()
        with client_of(port, "secret") as client:
            request = {"model": path, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = client.chat.completions.create(**request)
            assert answer.choices[0].message.role == "assistant" and answer.model == path
            answer = client.responses.create(model=path, input="Hello", max_output_tokens=4)
            assert answer.object == "response" and answer.model == path
        place = ("127.0.0.1", port)
        with socket.create_connection(place), socket.create_connection(place):  # without a request
            time.sleep(0.5)
            assert status_of(port, b"{}") == 503
        time.sleep(0.5)
        assert status_of(port, b"{}") == 401


@pytest.fixture(scope="module")
def server(folder):
    """Return the port and the folder of a Luna with 512 positions and a chat template."""
    path = folder("luna", TEMPLATE)
    with serving(path) as (port, _):
        yield port, path


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone", "/docs", "/"])
def test_other_paths_do_not_exist(path, server, tmp_path):
    body = json.dumps({"model": str(tmp_path)}).encode()
    assert send(server[0], path, body)[0] == 404 and send(server[0], path)[0] == 404
    assert send(server[0], "/health")[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "attacker.example"}, 403),
        ({"host": "attacker.example:PORT"}, 403),
        ({"host": "localhost.attacker.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "localhost:PORT"}, 200),
        ({"host": "192.0.2.1:PORT"}, 200),
        ({"host": "[::1]:PORT"}, 200),
        ({"origin": "http://attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "http://127.0.0.1:PORT"}, 200),
    ],
)
def test_web_pages_of_another_origin_are_rejected(headers, status, server):
    headers = {name: value.replace("PORT", str(server[0])) for name, value in headers.items()}
    assert send(server[0], "/v1/models", headers=headers)[0] == status
    body = json.dumps(PROMPT | {"model": server[1]}).encode()
    assert send(server[0], "/v1/completions", body, headers)[0] == status


def test_malformed_requests_are_errors_before_a_stream_starts(server):
    """Every request of the unit tests, and texts that only the tokenizer or `generate` can reject."""
    requests = [(PATHS["completions"], text.encode()) for text in TEXTS]
    requests += [
        (PATHS[endpoint], json.dumps(VALID[endpoint] | {"max_tokens": 2} | {name: value}).encode())
        for endpoint, name, value in malformed()
        if endpoint != "responses"
    ]
    requests += [
        (PATHS[endpoint], json.dumps(VALID[endpoint] | {name: value}).encode())
        for endpoint, name, value in malformed()
        if endpoint == "responses"
    ]
    requests += [
        (PATHS["chat"], json.dumps(VALID["chat"] | fields | {"stream": stream}).encode())
        for fields in (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": 5}]},
            {"tools": [{"type": "function", "function": {"name": 5}}]},
            {"chat_template_kwargs": {"divisor": "a"}},
            {"chat_template_kwargs": {"load_audio_from_video": True}},
        )
        for stream in (False, True)
    ]
    for fields in (
        {"prompt": ""},
        {"prompt": "x" * 600},
        {"max_tokens": 600},
        {"model": "another"},
        {"prompt": "x" * 513},
    ):
        requests += [
            (PATHS["completions"], json.dumps(PROMPT | fields | {"stream": stream}).encode())
            for stream in (False, True)
        ]
    answers = [(*send(server[0], path, body), body[:100]) for path, body in requests]
    assert [answer for answer in answers if answer[0] != 400] == [] and len(answers) > 200
    assert all(json.loads(content)["error"]["message"] for _, content, _ in answers)


def test_the_last_position_can_be_used(server, complete):
    """512 positions: the last new token is not an input."""
    request = {"model": server[1], "prompt": "x" * 510, "max_tokens": 3, "temperature": 0}
    with client_of(server[0]) as client:
        answer = client.completions.create(**request)
        assert answer.choices[0].text == complete("luna", "x" * 510, 3) and answer.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError, match="512 positions"):
            client.completions.create(**request | {"max_tokens": 4})
        assert client.completions.create(**request | {"max_tokens": None}).usage.total_tokens <= 513


def test_temperature_and_seed_apply_to_their_request(server):
    """The generation config of the folder is greedy."""
    with client_of(server[0]) as client:

        def write(seed, **fields):
            request = {"model": server[1], "prompt": "Hello", "max_tokens": 30, "seed": seed} | fields
            return client.completions.create(**request).choices[0].text

        assert write(1, temperature=1) == write(1, temperature=1) != write(2, temperature=1)
        assert write(1, top_p=0.99) != write(1)
        assert write(1) == write(2) == write(2, temperature=0, top_p=0.5)


def test_max_prompt(folder):
    path = folder("mega")
    with serving(path, "--max-prompt", "5") as (port, _), client_of(port) as client:
        request = {"model": path, "max_tokens": 2}
        assert client.completions.create(**request, prompt="x" * 5).usage.prompt_tokens == 5
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="6 tokens, but the limit is 5"):
                client.completions.create(**request, prompt="x" * 6, stream=stream)


@pytest.mark.parametrize(("number", "stream"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_signals_stop_the_server_while_a_response_is_in_progress(number, stream, folder):
    body = {
        "prompt": "Hello",
        "max_tokens": 100_000,
        "stream": stream,
        "generation_config": '{"min_new_tokens": 100000}',
    }
    with serving(folder("mega")) as (port, process), socket.create_connection(("127.0.0.1", port)) as client:
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
        client.sendall((head + text).encode())
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(15) == 0
