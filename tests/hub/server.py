"""A Hub on the loopback address for the client of huggingface_hub: repositories are created, pushed to and loaded."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

ID = r"[\w.-]+(?:/[\w.-]+)?"


def metadata_errors(content: str) -> list[str]:
    """Return the reasons for which the Hub would reject a model card, as far as they can be determined here."""
    from huggingface_hub import ModelCard  # late: a program may set the address of the server before this import

    try:
        data = ModelCard(content).data
    except ValueError as error:
        return [str(error)]
    names = [data.get("base_model") or "none", *(data.get("datasets") or [])]
    errors = [f"{name!r} is no repository" for name in names if not re.fullmatch(ID, name)]
    return errors + ["license: must be a string"] * (not isinstance(data.get("license"), str | None))


class Handler(BaseHTTPRequestHandler):
    """Answer the requests that huggingface_hub 1.x and 2.x send with HF_HUB_DISABLE_XET=1."""

    protocol_version = "HTTP/1.1"
    server: "LoopbackHub"

    def log_message(self, *args):
        pass

    def do_request(self):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests += [path] if path.startswith(("/api/models", "/api/datasets")) else []
        if re.fullmatch(self.server.failing, path):
            return self.error(self.server.status, "InternalError")
        for pattern, route in ROUTES.items():
            if found := re.fullmatch(pattern, path):
                return route(self, body, *found.groups())
        self.error(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = do_request

    def reply(self, content: object, status: int = 200, **headers: str):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(self, status: int, code: str, **headers: str):
        self.reply({"error": code}, status, X_Error_Code=code, X_Error_Message=code, **headers)

    def whoami(self, body):
        self.reply({"type": "user", "name": "tester", "orgs": [], "auth": {"type": "access_token"}})

    def validate_yaml(self, body):
        errors = [{"message": message} for message in metadata_errors(json.loads(body)["content"])]
        self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create(self, body):
        name = f"tester/{json.loads(body)['name']}"
        self.server.repositories.setdefault(name, {})
        self.reply({"url": f"{self.server.url}/{name}", "id": name, "name": name})

    def preupload(self, body, name):
        """Let the client send all files with the commit, and none of them separately."""
        modes = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
        self.reply({"files": [mode | {"shouldIgnore": False} for mode in modes]})

    def commit(self, body, name):
        lines = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
        files = {file["path"]: base64.b64decode(file["content"]) for file in lines}
        self.server.repositories[name] |= files
        address = f"{self.server.url}/{name}/commit/{self.server.revision(name)}"
        self.reply({"success": True, "commitOid": self.server.revision(name), "commitUrl": address})

    def info(self, body, name):
        if name not in self.server.repositories:
            return self.error(404, "RepoNotFound")
        files = [{"rfilename": path} for path in self.server.repositories[name]]
        self.reply({"id": name, "sha": self.server.revision(name), "private": False, "tags": [], "siblings": files})

    def resolve(self, body, name, path):
        if name not in self.server.repositories:
            return self.error(404, "RepoNotFound")
        data, revision = self.server.repositories[name].get(path), self.server.revision(name)
        if data is None:
            return self.error(404, "EntryNotFound", X_Repo_Commit=revision)
        self.reply(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=revision)


ROUTES = {
    r"/api/whoami-v2": Handler.whoami,
    r"/api/validate-yaml": Handler.validate_yaml,
    r"/api/repos/create": Handler.create,
    rf"/api/models/({ID})/preupload/main": Handler.preupload,
    rf"/api/models/({ID})/commit/main": Handler.commit,
    rf"/api/(?:models|datasets)/({ID})(?:/revision/[^/]+)?": Handler.info,
    rf"/({ID})/resolve/[^/]+/(.+)": Handler.resolve,
}


class LoopbackHub(ThreadingHTTPServer):
    """The server, which runs in a thread.

    `repositories` are the files of each repository, and `requests` the paths of requests about models and datasets; the
    client may send others when it starts. Requests for a path that matches `failing` fail with `status`.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.clear()
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def settings(self) -> dict[str, str]:
        """Return the environment variables of a client; huggingface_hub reads them when it is imported."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_loopback",
            "NO_PROXY": "127.0.0.1",
        }

    def clear(self) -> None:
        """Remove repositories and failures."""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.failing, self.status = "", 500

    def revision(self, name: str) -> str:
        """Return the name of the last commit of a repository, which its files determine."""
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()
