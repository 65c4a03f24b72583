"""A small Hugging Face Hub on this machine: what huggingface_hub asks for of models, over HTTP, with its faults."""

import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "1234567890abcdef1234567890abcdef12345678"
TOKEN = "hf_" + "a" * 34
_NO_PROXY = ("NO_PROXY", "no_proxy")  # this machine's own is asked without one, whatever its variables say


@dataclass
class Repo:
    """A repository."""

    files: dict[str, bytes]  # bytes by name
    commit: str = COMMIT
    served: dict[str, bytes] = field(default_factory=dict)  # other bytes than the hub tells the hash of
    needs_token: str | None = None  # "gated" or "private"
    accepted: bool = True  # the terms, by the account of TOKEN


class FakeHub:
    """The server.

    break_after: bytes of a file after which each answer breaks off, None for never.  stalled: an event that such an
    answer waits for before it does, None for none.  ranges: whether a part of a file can be asked for.  status: of all
    answers, where that is not None.  log: (method, path, range) of each request.  leaked: files that were asked for
    with a token, at a host that is not the hub's.
    """

    def __init__(self):
        self.repos = {}
        self.break_after = None
        self.stalled = None
        self.ranges = True
        self.status = None
        self.log = []
        self.leaked = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                with suppress(BrokenPipeError, ConnectionResetError):
                    _answer(hub, self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.contents = f"http://localhost:{self._server.server_port}"  # another host, as the hub's files are on
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def ranges_asked(self):
        """Of the contents of files."""
        return [asked for verb, path, asked in self.log if verb == "GET" and path.startswith("/cdn/")]


def _answer(hub, request):
    path = unquote(urlsplit(request.path).path)
    hub.log.append((request.command, path, request.headers.get("Range")))
    if path.startswith("/cdn/") and request.headers.get("Authorization"):
        hub.leaked.append(path)
    if hub.status is not None:
        return _send(request, hub.status, b"{}")
    parts = path.strip("/").split("/")
    if parts[0] == "cdn":
        return _send_content(hub, request, hub.repos["/".join(parts[1:3])], "/".join(parts[3:]))
    name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
    repo = hub.repos.get(name)
    token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
    if token and token != TOKEN:
        return _send(request, 401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
    if repo is None and token:
        return _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
    if repo is None or (repo.needs_token == "private" and token != TOKEN):
        return _send(request, 401, b"{}", {"X-Error-Message": "Invalid username or password."})
    if parts[0] == "api":
        return _send(request, 200, json.dumps(_about(name, repo)).encode(), {"Content-Type": "application/json"})
    if repo.needs_token == "gated" and not (token == TOKEN and repo.accepted):
        return _send(request, 403 if token else 401, b"{}", {"X-Error-Code": "GatedRepo"})
    file = "/".join(parts[4:])
    if parts[2] != "resolve" or file not in repo.files:
        return _send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
    data = repo.files[file]
    headers = {"X-Repo-Commit": repo.commit, "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{_sha256(data)}"'}
    return _send(request, 302, b"", headers | {"Location": f"{hub.contents}/cdn/{name}/{file}"})


def _about(name, repo):
    siblings = [
        {"rfilename": file, "size": len(data), "blobId": "0" * 40}
        | ({"lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 134}} if file.endswith("f") else {})
        for file, data in repo.files.items()
    ]
    gated = "manual" if repo.needs_token == "gated" else False
    return {"id": name, "sha": repo.commit, "siblings": siblings, "gated": gated, "private": False, "tags": []}


def _send_content(hub, request, repo, file):
    data = repo.served.get(file, repo.files[file])
    asked = request.headers.get("Range")
    status, start, headers = 200, 0, {"ETag": f'"{_sha256(repo.files[file])}"', "Accept-Ranges": "bytes"}
    if asked and hub.ranges:
        start = int(asked.removeprefix("bytes=").partition("-")[0])
        status, headers["Content-Range"] = 206, f"bytes {start}-{len(data) - 1}/{len(data)}"
    rest = data[start:]
    if hub.break_after is None or len(rest) <= hub.break_after:
        return _send(request, status, rest, headers)
    _send(request, status, rest, headers, hub.break_after)
    if hub.stalled is not None:
        hub.stalled.wait(200)
    request.close_connection = True


def _send(request, status, data, headers=None, n_bytes=None):
    request.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data if n_bytes is None else data[:n_bytes])


def _sha256(data):
    return hashlib.sha256(data).hexdigest()


def use_hub(monkeypatch, hub, home, offline=False):
    """Let huggingface_hub in this process use a hub, and a folder for its cache and token. None: nothing answers."""
    from huggingface_hub import constants

    endpoint = "http://127.0.0.1:1" if hub is None else hub.endpoint
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": offline,
    }.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in _NO_PROXY:
        monkeypatch.setenv(name, "*")


def hub_variables(hub, home):
    """The environment of a process that uses a hub and a folder for its cache."""
    others = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}
    places = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    return places | others | dict.fromkeys(_NO_PROXY, "*")


def quiet_machine(monkeypatch, home):
    """A user whose folders are all in one that is given, and no others."""
    from edgeinfer.library import local

    monkeypatch.setenv("HOME", str(home))
    for name in ("EDGEINFER_MODELS", "OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local, "_OLLAMA_SERVICE", home / "service")
    use_hub(monkeypatch, None, home / ".cache/huggingface")
