# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""transformers' own server for a folder: what it must be told of our models, and what it does not answer by itself."""

import hmac
import signal
import sys
from pathlib import Path

import transformers
from transformers.cli.serve import Serve

from luna_mega.serving.families import FAMILIES

_CHAT = ("/v1/chat/completions", "/v1/responses")
_NO_TEMPLATE = (
    "the tokenizer of this folder has no chat template, so that it has no chat and no responses: ask /v1/completions"
)


class FolderServer(Serve):
    """Serve a folder, under the name that its path gives, until the process is told to end.

    Args:
        folder: a causal language model with its tokenizer.
        host, port: where to listen.
        key: what clients send as their key; None = anyone is answered.
        max_requests: connections at once, above which a client is told to come later; None = any number.
    """

    def __init__(self, folder: str, host: str, port: int, key: str | None, max_requests: int | None):
        self.folder, self.key, self.max_requests = folder, key, max_requests
        for name, family in FAMILIES.items():  # where the server looks for classes
            setattr(transformers, name, family.model_class)
        super().__init__(force_model=folder, host=host, port=port, non_blocking=True)

    def start_server(self):
        """Answer requests; the base class calls this when all is loaded."""
        manager, config = self._model_manager, self.server.config
        made = int(Path(self.folder, "config.json").stat().st_mtime)
        entry = {"id": self.folder, "object": "model", "owned_by": "luna-mega", "created": made}
        manager.get_gen_models = lambda *_: [entry]
        _, tokenizer = manager.load_model_and_processor(manager.process_model_name(self.folder))
        config.app.middleware("http")(Gate(self.key, tokenizer.chat_template is not None))
        if self.max_requests is not None:
            config.limit_concurrency = self.max_requests + 1  # as uvicorn counts the one that asks as well
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # behind uvicorn, which ends first
        self.server.run()


class Gate:
    """A look at each request before the server's own: whether it has the key, and needs a chat template."""

    def __init__(self, key: str | None, chats: bool):
        self.expected, self.chats = None if key is None else f"Bearer {key}".encode(), chats

    async def __call__(self, request, call_next):
        given = request.headers.get("authorization", "").encode()
        if self.expected is not None and not hmac.compare_digest(given, self.expected):
            return self.refuse(401, "this server wants a key, and the request has another or none")
        if not self.chats and request.url.path in _CHAT:
            return self.refuse(400, _NO_TEMPLATE)
        try:
            return await call_next(request)
        except ValueError as error:  # as a model refuses what it was asked, like a text that is too long
            return self.refuse(400, str(error))

    def refuse(self, status: int, message: str):
        """Return an error as clients of the protocol read it."""
        from starlette.responses import JSONResponse

        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error}, status_code=status)
