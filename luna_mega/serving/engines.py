# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The servers that `luna-mega serve` starts for the folder of a language model: transformers' own, or vLLM's."""

import os
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from transformers.utils.import_utils import is_serve_available

from luna_mega.errors import ConversionError, shown
from luna_mega.hub.folder import read_folder
from luna_mega.serving.families import FAMILIES
from luna_mega.serving.server import FolderServer

Start = Callable[[], None]


def prepare(
    folder: str,
    engine: str,
    host: str,
    port: int,
    key: str | None,
    max_length: int | None,
    max_requests: int | None,
) -> Start:
    """Return a function that serves a folder until the process ends, or refuse what cannot be served."""
    model = read_folder(folder)
    family = FAMILIES.get(model.model_class.__name__)
    if family is None:
        kinds = " or ".join(FAMILIES)
        raise ConversionError(f"{shown(folder)} has a {model.model_class.__name__}, and what is served is a {kinds}")
    if "@" in folder:
        raise ConversionError(f"{shown(folder)} has an @, which servers take for a revision: rename the folder")
    _check_address(host, port)
    if engine == "vllm":
        return _vllm(folder, model.config, family, host, port, key, max_length, max_requests)
    if not is_serve_available():
        raise ConversionError("the server of transformers is not installed: pip install 'luna-mega[serve]'")
    return lambda: FolderServer(folder, host, port, key, max_requests) and None


def _check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, which servers find out after they have loaded the model."""
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
            "vLLM is not installed: pip install 'luna-mega[vllm]', in an environment of its own, as it wants another "
            "transformers; or leave --engine out"
        )
    if (refusal := family.refusal(config)) is not None:
        raise ConversionError(f"vLLM cannot serve {shown(folder)}: {refusal}; or leave --engine out")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--host", host, "--port", str(port)]
    # By itself vLLM rounds weights of float32 to 16 bits.
    command += ["--dtype", str(config.dtype or torch.float32).removeprefix("torch.")]
    for option, limit in (("--max-model-len", max_length), ("--max-num-seqs", max_requests)):
        command += [] if limit is None else [option, str(limit)]
    if family.any_length:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    if key is not None:
        os.environ["VLLM_API_KEY"] = key  # not among the arguments, which other users of a machine can see
    return lambda: os.execv(sys.executable, command)
