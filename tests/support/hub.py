"""A hub on loopback, which stands in for that of Hugging Face: repositories, and what goes wrong with them."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

_LARGE: Final = ".safetensors"


@dataclass
class Hub:
    """What the hub has, and how it behaves.

    refusals: for a repository the status and code with which all of it is refused.
    cut: for a file after how many bytes a connection breaks, each time that it is asked for.
    stalls: for a file after how many bytes a connection stalls, until `released`; `stalled` tells that it does.
    altered: for a file what is sent in place of its content; checksums are those of the content.
    asked: method, path and range of each request for a file's content.
    """

    repositories: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    stalls: dict[str, int] = field(default_factory=dict)
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    altered: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def commit(self, repository: str) -> str:
        return hashlib.sha1(repository.encode()).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
            thread.join()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
    if name.endswith(_LARGE):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 130}
    return entry


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        is_api = path[:2] == ["api", "models"]
        repository = "/".join(path[2:4] if is_api else path[:2])
        if repository in self.hub.refusals:
            self._refuse(*self.hub.refusals[repository])
            return
        if repository not in self.hub.repositories:
            self._refuse(401, "RepoNotFound")
            return
        files = self.hub.repositories[repository]
        if not is_api:
            self._send_file(repository, "/".join(path[4:]), files)
        elif "tree" in path:
            self._send_json([_entry(*item) for item in files.items()])
        else:
            self._send_info(repository, files)

    def _send_info(self, repository: str, files: Mapping[str, bytes]) -> None:
        siblings = [
            {"rfilename": entry["path"], **entry}
            for entry in (_entry(*item) for item in files.items())
        ]
        commit = self.hub.commit(repository)
        self._send_json({"id": repository, "sha": commit, "siblings": siblings})

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, repository: str, name: str, files: Mapping[str, bytes]) -> None:
        if name not in files:
            self._refuse(404, "EntryNotFound")
            return
        entry = _entry(name, files[name])
        content = self.hub.altered.get(name, files[name])
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{entry.get("lfs", {}).get("oid", entry["oid"])}"')
        self.send_header("X-Repo-Commit", self.hub.commit(repository))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self.hub.asked.append((name, asked))
            self._send_content(name, content[start:])

    def _send_content(self, name: str, content: bytes) -> None:
        if stall := self.hub.stalls.pop(name, None):
            self.wfile.write(content[:stall])
            self.hub.stalled.set()
            self.hub.released.wait()
            self.close_connection = True
        elif cuts := self.hub.cut.get(name):
            self.wfile.write(content[: cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(content)
