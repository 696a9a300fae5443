"""A Hub on the loopback address for the real huggingface_hub client: create, upload, load, and fail on request.

It supports the requests that huggingface_hub 1.x and 2.x send with HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard

TOKEN = "hf_loopback"
USER = "tester"
LFS_SUFFIXES = (".safetensors", ".bin", ".png")
REPOSITORY = r"([^/]+/[^/]+?)"
ID = r"[\w.-]+(/[\w.-]+)?"


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


def metadata_errors(content: str) -> list[str]:
    """Return the reasons for which the Hub would reject a model card, as far as they can be determined here."""
    try:
        data = ModelCard(content).data
    except ValueError as error:
        return [str(error)]
    named = [
        ("base_model", data.get("base_model") or "none"),
        *(("datasets", name) for name in data.get("datasets") or []),
    ]
    errors = [f"{field}: {name!r} is no repository" for field, name in named if not re.fullmatch(ID, name)]
    return errors + ["license: must be a string"] * (not isinstance(data.get("license"), str | None))


class Handler(BaseHTTPRequestHandler):
    """Pass each request to the method of `ROUTES` that matches it. LoopbackHub sets `hub`."""

    protocol_version = "HTTP/1.1"
    hub: "LoopbackHub"

    def log_message(self, *args):
        pass

    def do_request(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        fault = self.hub.take_fault(self.hub.requests[-1])
        if fault == "cut":
            self.rfile.read(int(self.headers.get("Content-Length", 2)) // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        body = self.read_body()
        if fault:
            self.error(fault, "InternalError", "the loopback Hub fails on request")
            return
        for methods, pattern, route in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split():
                route(self, body, *match.groups())
                return
        self.error(404, "EntryNotFound", f"no route for {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = do_request

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def reply(self, content: object = None, status: int = 200, **headers: str):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")  # closes connections, so that a stopped server cannot be reached
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(self, status: int, code: str, message: str, **headers: str):
        self.reply({"error": message}, status, X_Error_Code=code, X_Error_Message=message, **headers)

    def authorized(self, code: str = "Unauthorized") -> bool:
        """Return whether the request has the token; otherwise reply with status 401."""
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.error(401, code, "Invalid username or password.")
        return False

    def repository(self, name: str, writes: bool = False) -> Repository | None:
        """Return the repository, or reply with an error and return None.

        The Hub does not reveal to unauthorized clients whether a private repository exists.
        """
        repository = self.hub.repositories.get(name)
        if writes and not self.authorized():
            return None
        if repository and repository.private and not self.authorized("RepoNotFound"):
            return None
        if repository is None:
            self.error(404, "RepoNotFound", "Repository not found")
        return repository

    def whoami(self, body):
        if self.authorized():
            self.reply({"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {"type": "access_token"}})

    def validate_yaml(self, body):
        errors = [{"message": message} for message in metadata_errors(json.loads(body)["content"])]
        self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create(self, body):
        if not self.authorized():
            return
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        exists = name in self.hub.repositories
        if not exists:
            self.hub.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        self.reply({"url": f"{self.hub.url}/{name}", "id": name, "name": name}, 409 if exists else 200)

    def preupload(self, body, name):
        if self.repository(name, writes=True):
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(LFS_SUFFIXES) else "regular" for path in paths}
            self.reply(
                {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}
            )

    def lfs_batch(self, body, name):
        if not self.repository(name, writes=True):
            return
        objects = json.loads(body)["objects"]
        for entry in objects:
            if entry["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/lfs/{entry['oid']}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, body, oid):
        if hashlib.sha256(body).hexdigest() == oid:
            self.hub.objects[oid] = body
            self.reply()
        else:
            self.error(400, "BadRequest", "the content does not have this hash")

    def lfs_verify(self, body, oid):
        self.reply({}, 200 if oid in self.hub.objects else 404)

    def commit(self, body, name):
        """Apply a commit atomically."""
        repository = self.repository(name, writes=True)
        if not repository:
            return
        files = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        sha = hashlib.sha1(repository.commits[-1].encode() + body).hexdigest()
        repository.files = files
        repository.commits.append(sha)
        self.reply({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

    def info(self, body, name):
        if repository := self.repository(name):
            files = [{"rfilename": path} for path in repository.files]
            private, sha = repository.private, repository.commits[-1]
            self.reply({"id": name, "modelId": name, "sha": sha, "private": private, "tags": [], "siblings": files})

    def tree(self, body, name, folder):
        if repository := self.repository(name):
            inside = [path for path in repository.files if path.startswith(f"{folder}/" if folder else "")]
            if inside:
                self.reply([{"type": "file", "path": path, "size": len(repository.files[path])} for path in inside])
            else:
                self.error(404, "EntryNotFound", "Entry not found")

    def resolve(self, body, name, path):
        if not (repository := self.repository(name)):
            return
        commit, data = repository.commits[-1], repository.files.get(path)
        if data is None:
            self.error(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
        else:
            self.reply(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=commit)


ROUTES = [
    ("GET", r"/api/whoami-v2", Handler.whoami),
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", rf"/api/models/{REPOSITORY}/preupload/[^/]+", Handler.preupload),
    ("POST", rf"/{REPOSITORY}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", Handler.lfs_put),
    ("POST", r"/lfs/([0-9a-f]{64})/verify", Handler.lfs_verify),
    ("POST", rf"/api/models/{REPOSITORY}/commit/[^/]+", Handler.commit),
    ("GET", rf"/api/(?:models|datasets)/{REPOSITORY}(?:/revision/[^/]+)?", Handler.info),
    ("GET", r"/api/models/([^/]+)", Handler.info),  # names without a user
    ("GET", rf"/api/models/{REPOSITORY}/tree/[^/]+/?(.*)", Handler.tree),
    ("GET HEAD", rf"/{REPOSITORY}/resolve/[^/]+/(.+)", Handler.resolve),
]


class LoopbackHub:
    """The server, which runs in a thread. `repositories` are its contents and `requests` the received requests."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faulty, self.faults = "", []
        self.address = ("127.0.0.1", 0)
        self.start()

    def start(self):
        """Start the server, or restart it on the same port."""
        self.server = ThreadingHTTPServer(self.address, type("BoundHandler", (Handler,), {"hub": self}))
        self.address = self.server.server_address
        self.url = f"http://127.0.0.1:{self.address[1]}"
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the server during the block."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def fail(self, request: str, kind: int | str, times: int = 1000):
        """Make the next `times` matching requests, such as "PUT /lfs/.*", fail with an error status.

        If `kind` is "cut", the connection is closed while the body is sent. `faults.clear()` ends the failures.
        """
        self.faulty, self.faults = request, [kind] * times

    def take_fault(self, request: str) -> int | str | None:
        return self.faults.pop() if self.faults and re.fullmatch(self.faulty, request) else None
