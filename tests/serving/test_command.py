"""Errors of `luna-mega serve`, one line each, and the arguments that it passes to vLLM."""

import os
import socket

import pytest

import luna_mega
import luna_mega_cli
from luna_mega.serving import engines


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a causal model, an encoder, and a Mega without chunks."""
    size = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    mega = {"is_decoder": True, "bidirectional": False}
    made = {
        "luna": luna_mega.LunaForCausalLM(luna_mega.LunaConfig(**size, num_attention_heads=2, is_decoder=True)),
        "encoder": luna_mega.LunaForMaskedLM(luna_mega.LunaConfig(**size, num_attention_heads=2)),
        "complete": luna_mega.MegaForCausalLM(luna_mega.MegaConfig(**size, **mega)),
        "chunks": luna_mega.MegaForCausalLM(luna_mega.MegaConfig(**size, **mega, use_chunking=True, chunk_size=8)),
    }
    root = tmp_path_factory.mktemp("folders")
    for name, model in made.items():
        model.save_pretrained(root / name)
    return root


def run(capsys, *argv):
    status = luna_mega_cli.main(["serve", *map(str, argv)])
    return status, capsys.readouterr()


def error_of(capsys, *argv):
    status, output = run(capsys, *argv)
    assert status == 1 and output.err.count("\n") == 1 and not output.out
    return output.err


def test_mega_with_chunks_supports_any_length(folders, port, capsys, monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    monkeypatch.setattr(os, "execv", lambda program, command: None)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "")  # so that it is restored at the end
    for name, allowed in (("luna", None), ("chunks", "1")):  # a Luna has a table of positions
        monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
        assert run(capsys, folders / name, "--engine", "vllm", "--port", port, "--max-length", 9000)[0] == 0
        assert os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == allowed


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_only_causal_language_models_are_served(folders, port, capsys):
    message = error_of(capsys, folders / "encoder", "--port", port)
    assert "contains a LunaForMaskedLM; only LunaForCausalLM or" in message


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("key", ["", " ", "a b", "ключ", "a\tb"])
def test_key_that_no_header_can_contain_raises(key, engine, folders, port, capsys):
    message = error_of(capsys, folders / "luna", "--port", port, "--key", key, "--engine", engine)
    assert "key" in message and "Traceback" not in message


def test_empty_host_raises(folders, port, capsys):
    assert "the host is empty" in error_of(capsys, folders / "luna", "--port", port, "--host", "")


def test_a_missing_extra_is_named(folders, port, capsys, monkeypatch):
    monkeypatch.setattr(engines, "is_serve_available", lambda: False)
    assert "`pip install '.[serve]'` in a clone" in error_of(capsys, folders / "luna", "--port", port)
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert "`pip install '.[vllm]'` in a clone" in error_of(
        capsys, folders / "luna", "--port", port, "--engine", "vllm"
    )


def test_address_in_use_raises(folders, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert f"cannot listen on '127.0.0.1', port {taken}" in error_of(capsys, folders / "luna", "--port", taken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-length", "64"], "--max-length applies to --engine vllm"),
        (["--max-prompt", "64", "--engine", "vllm"], "--max-prompt applies to the server of transformers"),
    ],
)
def test_a_limit_of_the_other_engine_is_an_error(options, message, folders, capsys):
    with pytest.raises(SystemExit) as stop:
        luna_mega_cli.main(["serve", str(folders / "luna"), *options])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_vllm_receives_options_and_key_separately(folders, port, capsys, monkeypatch):
    called = []
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    monkeypatch.setattr(os, "execv", lambda program, command: called.append(command))
    monkeypatch.setenv("VLLM_API_KEY", "another")
    options = ("--engine", "vllm", "--port", port, "--max-length", 64, "--max-requests", 3, "--key", "secret", "--json")
    status, output = run(capsys, folders / "luna", *options)
    assert status == 0 and f'"address": "http://127.0.0.1:{port}/v1"' in output.out
    (command,) = called
    assert command[2:] == [
        "vllm.entrypoints.cli.main", "serve", str(folders / "luna"), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "3",
    ]  # fmt: skip
    assert os.environ["VLLM_API_KEY"] == "secret"
    assert "vLLM cannot serve" in error_of(capsys, folders / "complete", "--engine", "vllm", "--port", port)
