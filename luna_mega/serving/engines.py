# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Servers that `luna-mega serve` starts for a language model: transformers' own server or vLLM."""

import importlib
import os
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from transformers.utils.import_utils import is_serve_available

from luna_mega.errors import ConversionError, install, shown
from luna_mega.hub.folder import read_folder
from luna_mega.serving.families import FAMILIES

Start = Callable[[], None]


def prepare(
    folder: str,
    engine: str,
    host: str,
    port: int,
    key: str | None,
    max_length: int | None,
    max_prompt: int | None,
    max_requests: int | None,
) -> Start:
    """Return a function that serves a folder until the process ends.

    Raises:
        ConversionError: If the folder, the address or the key cannot be used, or the engine is not installed.
    """
    model = read_folder(folder)
    family = FAMILIES.get(model.model_class.__name__)
    if family is None:
        kinds = " or ".join(FAMILIES)
        raise ConversionError(f"{shown(folder)} contains a {model.model_class.__name__}; only {kinds} can be served")
    _check_key(key)
    _check_address(host, port)
    if engine == "vllm":
        return _vllm(folder, model.config, family, host, port, key, max_length, max_requests)
    if not is_serve_available():
        raise ConversionError(f"the server of transformers is not installed; run {install('serve')}")
    server = importlib.import_module("luna_mega.serving.server")
    return lambda: server.serve_folder(model, folder, host, port, key, max_prompt, max_requests)


def _check_key(key: str | None) -> None:
    """Raise an error for a key that an HTTP header cannot contain."""
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConversionError(f"the key {shown(key)} cannot be sent in a header; use ASCII characters without spaces")


def _check_address(host: str, port: int) -> None:
    """Raise an error if the address cannot be used; servers only notice after they have loaded the model."""
    if not host:  # the socket module would listen on all addresses
        raise ConversionError("the host is empty; use 127.0.0.1 for this machine or 0.0.0.0 for all addresses")
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConversionError(f"cannot listen on {shown(host)}, port {port}: {error.strerror or error}") from error


def _vllm(folder, config, family, host, port, key, max_length, max_requests) -> Start:
    if find_spec("vllm") is None:
        raise ConversionError(
            f"vLLM is not installed; run {install('vllm')} in a separate environment, because it requires another "
            "version of transformers, or omit --engine"
        )
    if (reason := family.unsupported(config)) is not None:
        raise ConversionError(f"vLLM cannot serve {shown(folder)}: {reason}; or omit --engine")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--host", host, "--port", str(port)]
    # By default vLLM converts float32 weights to 16 bits.
    command += ["--dtype", str(config.dtype or torch.float32).removeprefix("torch.")]
    for option, limit in (("--max-model-len", max_length), ("--max-num-seqs", max_requests)):
        command += [] if limit is None else [option, str(limit)]
    if family.any_length:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    if key is not None:
        os.environ["VLLM_API_KEY"] = key  # not an argument, because other users of the machine can read those
    return lambda: os.execv(sys.executable, command)
