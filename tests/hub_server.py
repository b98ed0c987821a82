"""A small hub on loopback for the unmodified `huggingface_hub` client: repositories, branches, LFS, commits, faults.

Commits are made of whole trees, so that a test can see what a branch shows at any time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_test"
Tree = dict[str, tuple[str, bytes]]


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """``branches`` name commits, and commits are trees: path -> (``regular`` or ``lfs``, content)."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Tree] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, tree: Tree, message: str) -> str:
        content = repr((sorted(tree.items()), message, len(self.commits), self.branches.get(branch)))
        oid = hashlib.sha1(content.encode()).hexdigest()
        self.commits[oid], self.messages[oid], self.branches[branch] = dict(tree), message, oid
        return oid

    def tree(self, revision: str) -> Tree | None:
        return self.commits.get(self.branches.get(revision, revision))


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests of a method whose path matches.

    ``kind``: a status code, ``cut`` (no answer, nothing done) or ``lost`` (done, but the answer is cut off).
    """

    method: str
    pattern: str
    kind: int | str
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """The state behind the server."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    # What is stored of an LFS object; a storage that damages files changes it.
    store: Callable[[bytes], bytes] = bytes
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, repo: str, files: dict[str, bytes] | None = None, private: bool = False) -> Repo:
        """A repository with a first commit, as the hub makes one."""
        self.repos[repo] = Repo(private)
        self.repos[repo].commit("main", {k: ("regular", v) for k, v in (files or {}).items()}, "initial commit")
        return self.repos[repo]

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        tree = self.repos[repo].tree(revision)
        assert tree is not None
        return {path: content for path, (_, content) in tree.items()}


class Answer(Exception):
    """A request's end with another status than 200."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        else:
            body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            fault = self._fault(path)
            if fault is not None and fault.kind == "cut":
                self.close_connection = True
                return
            if fault is not None and isinstance(fault.kind, int):
                self._answer(fault.kind, b"a fault", fault.headers)
                return
            try:
                status, content, headers = 200, *self._route(path, body)
            except Answer as answer:
                extra = {"X-Error-Code": answer.code} if answer.code else {}
                status, content, headers = answer.status, b"", {**extra, "X-Error-Message": answer.message}
            if fault is not None:
                self.close_connection = True
                return
        self._answer(status, content, headers)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _fault(self, path: str) -> Fault | None:
        for fault in self.hub.faults:
            if fault.times and fault.method == self.command and re.search(fault.pattern, path):
                fault.times -= 1
                return fault
        return None

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _route(self, path: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        writes = self.command not in ("GET", "HEAD") and not path.startswith("/objects/")
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Answer(401, message="Invalid credentials in Authorization header")
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", lambda body: {}),
            ("GET", r"/api/models/([^/]+/[^/]+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/refs", self._refs),
            ("GET", r"/api/models/([^/]+/[^/]+)/tree/(.+)", self._tree),
            ("POST", r"/api/models/([^/]+/[^/]+)/branch/(.+)", self._branch),
            ("DELETE", r"/api/models/([^/]+/[^/]+)/branch/(.+)", self._delete_branch),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self._preupload),
            ("POST", r"/api/models/([^/]+/[^/]+)/paths-info/(.+)", self._paths_info),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/(.+)", self._commit),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"/objects/([0-9a-f]{64})", self._put),
        ]
        for method, pattern, serve in routes:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                return json.dumps(serve(*match.groups(), body)).encode(), {"Content-Type": "application/json"}
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match and self.command in ("GET", "HEAD"):
            return self._resolve(*match.groups())
        raise Answer(404, "RepoNotFound" if path.startswith("/api/models") else "", f"no such address: {path}")

    def _repo(self, name: str) -> Repo:
        if name not in self.hub.repos:
            raise Answer(404, "RepoNotFound", "Repository not found")
        return self.hub.repos[name]

    def _at(self, name: str, revision: str) -> Tree:
        tree = self._repo(name).tree(revision)
        if tree is None:
            raise Answer(404, "RevisionNotFound", "Invalid rev id")
        return tree

    def _create(self, body: bytes) -> Any:
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repos:
            raise Answer(409, message="You already created this model repo")
        self.hub.add(name, {".gitattributes": b"*.safetensors lfs"}, wanted.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{name}"}

    def _info(self, name: str, *rest: Any) -> Any:
        repo, revision = self._repo(name), rest[0] if len(rest) > 1 else "main"
        self._at(name, revision)
        sha = repo.branches.get(revision, revision)
        return {"id": name, "modelId": name, "sha": sha, "private": repo.private, "siblings": [], "tags": []}

    def _refs(self, name: str, body: bytes) -> Any:
        branches = self._repo(name).branches.items()
        found = [{"name": k, "ref": f"refs/heads/{k}", "targetCommit": v} for k, v in branches]
        return {"branches": found, "converts": [], "tags": []}

    def _tree(self, name: str, revision: str, body: bytes) -> Any:
        revision, _, folder = revision.partition("/")
        if folder:
            raise Answer(404, "EntryNotFound", "no such folder")
        return [_entry(path, *entry) for path, entry in self._at(name, revision).items()]

    def _branch(self, name: str, branch: str, body: bytes) -> Any:
        repo = self._repo(name)
        if branch in repo.branches:
            raise Answer(409, message="Reference already exists")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        self._at(name, start)
        repo.branches[branch] = repo.branches.get(start, start)
        return {}

    def _delete_branch(self, name: str, branch: str, body: bytes) -> Any:
        if self._repo(name).branches.pop(branch, None) is None:
            raise Answer(404, "RevisionNotFound", "no such branch")
        return {}

    def _preupload(self, name: str, revision: str, body: bytes) -> Any:
        tree = self._at(name, revision)

        def answer(path: str) -> dict[str, Any]:
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            oid = _entry(path, *tree[path])["oid"] if path in tree else None
            return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

        return {"files": [answer(file["path"]) for file in json.loads(body)["files"]]}

    def _batch(self, name: str, body: bytes) -> Any:
        self._repo(name)
        objects = []
        for wanted in json.loads(body)["objects"]:
            found = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                found["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{wanted['oid']}", "header": {}}}
            objects.append(found)
        return {"transfer": "basic", "objects": objects}

    def _put(self, oid: str, body: bytes) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Answer(400, message="the content is not what its name says")
        self.hub.objects[oid] = self.hub.store(body)
        return {}

    def _paths_info(self, name: str, revision: str, body: bytes) -> Any:
        tree = self._at(name, revision)
        return [_entry(path, *tree[path]) for path in parse_qs(body.decode())["paths"] if path in tree]

    def _commit(self, name: str, branch: str, body: bytes) -> Any:
        repo, tree = self._repo(name), dict(self._at(name, branch))
        header, *lines = [json.loads(line) for line in body.splitlines()]
        parent = header["value"].get("parentCommit")
        if parent is not None and parent != repo.branches.get(branch):
            raise Answer(412, message="A commit has happened since")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = ("regular", base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Answer(400, message=f"no such object: {value['oid']}")
                tree[value["path"]] = ("lfs", self.hub.objects[value["oid"]])
                _POINTERS[self.hub.objects[value["oid"]]] = value["oid"]
            else:
                del tree[value["path"]]
        oid = repo.commit(branch, tree, header["value"]["summary"])
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid}

    def _resolve(self, name: str, revision: str, path: str) -> tuple[bytes, dict[str, str]]:
        tree = self._at(name, revision)
        if path not in tree:
            raise Answer(404, "EntryNotFound", "Entry not found")
        entry = _entry(path, *tree[path])
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        commit = self._repo(name).branches.get(revision, revision)
        return tree[path][1], {"ETag": f'"{etag}"', "X-Repo-Commit": commit}


# An object's name stays that of what was uploaded, whatever a storage that damages files made of it.
_POINTERS: dict[bytes, str] = {}


def _entry(path: str, kind: str, content: bytes) -> dict[str, Any]:
    if kind == "regular":
        return {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
    oid = _POINTERS[content]
    lfs = {"oid": oid, "size": len(content), "pointerSize": 134}
    return {"type": "file", "path": path, "size": len(content), "oid": git_oid(oid.encode()), "lfs": lfs}


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub for the length of the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
