# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""HTTP server of one model folder, with the endpoints of `transformers serve` that a causal language model needs.

The application is built here instead of by `transformers.cli.serve`, which also loads and unloads models by request.
"""

import asyncio
import hmac
import ipaddress
import math
import os
import signal
import sys
import uuid
from typing import Any
from urllib.parse import urlsplit

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState, Modality

from luna_mega.errors import reason, shown
from luna_mega.hub.folder import ModelFolder, position_limit, read_tokenizer
from luna_mega.serving.requests import CHAT, COMPLETIONS, RESPONSES, Endpoint, RequestError, check_request, parse_json

DEFAULT_MAX_TOKENS = 1024
SHUTDOWN_SECONDS = 5  # for the responses in progress when the server is told to stop
_POLL_SECONDS = 0.02


def serve_folder(
    folder: ModelFolder,
    name: str,
    host: str,
    port: int,
    key: str | None,
    max_prompt: int | None,
    max_requests: int | None,
) -> None:
    """Serve a model until SIGTERM or SIGINT, then exit with status 0.

    Args:
        folder: Folder of a causal language model with its tokenizer.
        name: Name of the model in requests and responses.
        host: Address to listen on.
        port: Port to listen on.
        key: API key that clients send; None disables the check.
        max_prompt: Maximum number of tokens of a prompt; None means no limit but the positions of the model.
        max_requests: Maximum number of connections; further ones get an error 503. None means no limit.
    """
    tokenizer = read_tokenizer(folder.path)
    model = folder.load(dtype="auto", device_map="auto")
    app = build_app(model, tokenizer, name, host, key, max_prompt, int((folder.path / "config.json").stat().st_mtime))
    # uvicorn counts the connection of the current request as well.
    limit = None if max_requests is None else max_requests + 1
    config = uvicorn.Config(
        app, host=host, port=port, limit_concurrency=limit, timeout_graceful_shutdown=SHUTDOWN_SECONDS
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again after its shutdown
        signal.signal(number, _exit)
    uvicorn.Server(config).run()


def _exit(*_: Any) -> None:
    """Exit immediately; the interpreter would abort if the inference thread is still in `generate`."""
    sys.stdout.flush()
    os._exit(0)


def build_app(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    host: str,
    key: str | None,
    max_prompt: int | None,
    created: int = 0,
) -> Starlette:
    """Return the ASGI application that serves a model; see `serve_folder`."""
    manager = _Manager(model, max_prompt)
    arguments = {"model_manager": _Models(name, model, tokenizer), "generation_state": _State(manager)}
    entry = {"id": name, "object": "model", "owned_by": "luna-mega", "created": created}

    def route(path: str, handler: type[BaseHandler], endpoint: Endpoint) -> Route:
        template = "" if endpoint is COMPLETIONS else tokenizer.chat_template
        sampling = type(handler.__name__, (_Sampling, handler), {})(**arguments)
        return Route(path, _Service(sampling, endpoint, manager, template).answer, methods=["POST"])

    routes = [
        route("/v1/completions", CompletionHandler, COMPLETIONS),
        route("/v1/chat/completions", ChatCompletionHandler, CHAT),
        route("/v1/responses", ResponseHandler, RESPONSES),
        Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [entry]}), methods=["GET"]),
        Route("/health", lambda request: JSONResponse({"status": "ok"}), methods=["GET"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Gate, host=host, key=key)],
        exception_handlers=dict.fromkeys((HTTPException, ValueError), _error_response),
    )


class Gate:
    """Middleware that rejects requests without the key, or if there is none, requests of other web pages.

    Without a key, the server relies on the address it listens on. A web page of another origin could send requests
    from the user's browser, and DNS rebinding gives such a page the origin of the server. The `Host` header then
    contains the name of the page: only IP addresses, `localhost` and the `host` of the server are accepted.
    """

    def __init__(self, app: ASGIApp, host: str, key: str | None):
        self.app, self.names = app, {"localhost", host.lower()}
        self.expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.check(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.app if error is None else _json_error(error))(scope, receive, send)

    def check(self, headers: Headers) -> HTTPException | None:
        """Return the error of a request that is not allowed."""
        if self.expected is not None:
            if hmac.compare_digest(headers.get("authorization", "").encode(), self.expected):
                return None
            return HTTPException(401, "the request has no valid key; send the header `Authorization: Bearer KEY`")
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if not self.is_own(host):
            return HTTPException(403, f"the `Host` header {shown(host)} is not a name of this server; use --key KEY")
        if origin is not None and origin.lower().partition("://")[2] != host:
            return HTTPException(403, f"requests of the origin {shown(origin)} are not allowed; use --key KEY")
        return None

    def is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class _Service:
    """An endpoint: validates a request and passes it to a handler of transformers."""

    def __init__(self, handler: BaseHandler, endpoint: Endpoint, manager: "_Manager", template: Any):
        self.handler, self.endpoint, self.manager, self.template = handler, endpoint, manager, template

    async def answer(self, request: Request) -> Response:
        if self.template is None:
            raise RequestError("the tokenizer of this model has no chat template; use /v1/completions")
        body = check_request(self.endpoint, parse_json(await request.body()))
        if "tools" in body and "tools" not in str(self.template):
            raise RequestError("`tools` is not supported by the chat template of this model; omit it", "tools")
        try:
            response = await self.handler.handle_request(body, str(uuid.uuid4()))
            if body["stream"]:
                await self.manager.wait(request)
        except asyncio.CancelledError as error:
            raise HTTPException(503, "the server is shutting down") from error
        return response


class _Sampling(BaseHandler):
    """Request fields that the handlers of transformers only apply if the generation config of the folder samples."""

    def _build_generation_config(self, body: dict, model_generation_config: GenerationConfig, use_cb: bool = False):
        seed = body.pop("seed", None)  # transformers seeds now, not when the generation starts
        config = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        if body.get("temperature", 1) != 0 and (body.get("temperature") or body.get("top_p", 1) < 1):
            config.do_sample = True
        if not body.keys() & {"max_tokens", "max_output_tokens", "generation_config"}:
            config.max_new_tokens = None  # set by `_Manager`, which knows the length of the prompt
        config.seed = seed
        return config


class _Models:
    """The methods of transformers' `ModelManager` that handlers call, for one loaded model."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.force_model, self.loaded = name, (model, tokenizer)
        self.template, tokenizer.apply_chat_template = tokenizer.apply_chat_template, self.render

    def render(self, *args: Any, **options: Any) -> Any:
        """Apply the chat template, which raises any type of error for values that it does not expect."""
        try:
            return self.template(*args, **options)
        except Exception as error:
            message = f"the chat template of this model rejects the request ({type(error).__name__}: {reason(error)})"
            raise RequestError(message) from error

    def process_model_name(self, model_id: str) -> str:
        return self.force_model

    def load_model_and_processor(self, *_: Any, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return self.loaded

    def get_model_modality(self, *_: Any, **options: Any) -> Modality:
        return Modality.LLM


class _State(GenerationState):
    """The generation state of one model."""

    def __init__(self, manager: "_Manager"):
        super().__init__()
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> "_Manager":
        return self.manager


class _Call:
    """One call of `model.generate`, which is seeded when it starts and stores its error."""

    def __init__(self, model: PreTrainedModel, seed: int | None):
        self.model, self.seed, self.error = model, seed, None

    def generate(self, **options: Any) -> torch.Tensor:
        try:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            return self.model.generate(**options)
        except Exception as error:
            self.error = error
            raise


class _Manager(GenerateManager):
    """Runs `generate` for one request after the other, and checks the number of tokens before."""

    def __init__(self, model: PreTrainedModel, max_prompt: int | None):
        super().__init__()
        self.max_prompt, self.positions = max_prompt, position_limit(model.config)
        self.default = model.generation_config.max_new_tokens or DEFAULT_MAX_TOKENS
        self.stream = None

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, **options):
        call = self._call(model, inputs, gen_config)
        self.stream = (
            call,
            *super().generate_streaming(call, processor, inputs, gen_config, request_id=request_id, **options),
        )
        return self.stream[1:]

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        call = self._call(model, inputs, gen_config)
        return await super().generate_non_streaming(call, processor, inputs, gen_config, request_id=request_id)

    async def wait(self, request: Request) -> None:
        """Wait for the first token of the stream that was created last; raise errors that occur before.

        A handler creates a stream and returns its response without awaiting, so that no other stream is in between.
        """
        call, queue, streamer = self.stream
        try:
            while queue.empty():
                if await request.is_disconnected():
                    raise HTTPException(499, "the client has closed the connection")
                await asyncio.sleep(_POLL_SECONDS)
            if call.error is not None:
                raise call.error
        except BaseException:
            streamer.cancel()
            raise

    def _call(self, model: PreTrainedModel, inputs: dict, config: GenerationConfig) -> _Call:
        """Return the call of `generate`; `max_new_tokens` is set unless the request contains it."""
        count = inputs["input_ids"].shape[-1]
        if count == 0:
            raise RequestError("the prompt has no tokens; send at least one")
        if self.max_prompt is not None and count > self.max_prompt:
            raise RequestError(f"the prompt has {count} tokens, but the limit is {self.max_prompt}; shorten the prompt")
        room = math.inf if self.positions is None else self.positions + 1 - count  # the last token is not read
        if config.max_new_tokens is None:
            config.max_new_tokens = max(1, min(self.default, room))
        if config.max_new_tokens > room:
            raise RequestError(
                f"{count} prompt tokens and {config.max_new_tokens} new ones exceed the {self.positions} positions "
                "of the model; shorten the prompt or request fewer tokens"
            )
        return _Call(model, config.__dict__.pop("seed"))


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    return _json_error(error)


def _json_error(error: Exception) -> JSONResponse:
    """Return an error in the form of OpenAI's protocol: 400 unless the error has a status."""
    status = getattr(error, "status_code", 400)
    content = {"message": getattr(error, "detail", str(error)), "type": "invalid_request_error"}
    content |= {"param": getattr(error, "param", None), "code": None}
    return JSONResponse({"error": content}, status_code=status, headers=getattr(error, "headers", None))
