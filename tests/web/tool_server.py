"""A server of tools over streamable HTTP (Model Context Protocol), as strict as the page needs to be tested.

With `session` it begins with a handshake and refuses requests without its session; otherwise it is one of the revision
2026-07-28, which has neither.  The tool `echo` returns its text, `picture` an image, `hang` never returns.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, Final

SESSION: Final = "session-1"
TOKEN: Final = "marmalade"
_STATELESS: Final = "2026-07-28"
_ALLOWED: Final = "authorization, content-type, accept, mcp-protocol-version, mcp-session-id, mcp-method, mcp-name"


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {"name": name, "description": f"The tool {name}.", "inputSchema": schema}


@dataclass
class ToolServer:
    """What the server does, and what it was asked."""

    has_session: bool = True
    token: str = ""
    picture: str = ""
    methods: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    cancelled: Event = field(default_factory=Event)
    closed: Event = field(default_factory=Event)
    url: str = ""

    @property
    def origin(self) -> str:
        return self.url.removesuffix("/mcp")

    def result(self, method: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result of a request; None is an error."""
        if method == "initialize" and self.has_session:
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {}}
        if method == "tools/list":
            if params.get("cursor") == "2":
                return {"tools": [tool("picture"), tool("hang")]}
            return {"tools": [tool("echo")], "nextCursor": "2"}
        if method == "tools/call":
            return self._called(params)
        return None

    def _called(self, params: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(params)
        if params["name"] == "hang":
            self.cancelled.wait(30)
        if params["name"] == "picture":
            image = {"type": "image", "mimeType": "image/png", "data": self.picture}
            return {"content": [image]}
        return {"content": [{"type": "text", "text": params["arguments"]["text"]}]}


class _Handler(BaseHTTPRequestHandler):
    tools: ToolServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_OPTIONS(self) -> None:
        self._send(204)

    def do_DELETE(self) -> None:
        if self.headers["Mcp-Session-Id"] == SESSION:
            self.tools.closed.set()
        self._send(204)

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, params = message["method"], message.get("params", {})
        self.tools.methods.append(method)
        self.tools.headers.append({k.lower(): v for k, v in self.headers.items()})
        if self.tools.token and self.headers["Authorization"] != f"Bearer {self.tools.token}":
            self._send(401)
            return
        if not self._is_right(method, params):
            self._send(400)
            return
        if method == "notifications/cancelled":
            self.tools.cancelled.set()
        if "id" not in message:
            self._send(202)
            return
        self._answer(message["id"], method, self.tools.result(method, params))

    def _is_right(self, method: str, params: dict[str, Any]) -> bool:
        """Return whether a request has what its revision asks for."""
        if not {"application/json", "text/event-stream"} <= set(self.headers["Accept"].split(", ")):
            return False
        if method == "initialize":
            return True
        version = self.headers["MCP-Protocol-Version"]
        if self.tools.has_session:
            return version == "2025-11-25" and self.headers["Mcp-Session-Id"] == SESSION
        said = params.get("_meta", {}).get("io.modelcontextprotocol/protocolVersion")
        return version == said == _STATELESS and self.headers["Mcp-Method"] == method

    def _answer(self, id_: int, method: str, result: dict[str, Any] | None) -> None:
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": id_}
        if result is None:
            answer["error"] = {"code": -32601, "message": f"there is no {method}"}
        else:
            answer["result"] = result
        if method != "tools/call":
            self._send(200, json.dumps(answer), "application/json")
            return
        # As others do: ends of lines of two bytes, and something else first.
        note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x"}}
        events = "".join(f"event: message\r\ndata: {json.dumps(m)}\r\n\r\n" for m in (note, answer))
        self._send(200, events, "text/event-stream")

    def _send(self, status: int, body: str = "", kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in {
            "Access-Control-Allow-Origin": self.headers.get("Origin", "*"),
            "Access-Control-Allow-Methods": "POST, DELETE",
            "Access-Control-Allow-Headers": _ALLOWED,
            "Access-Control-Expose-Headers": "Mcp-Session-Id",
            "Content-Type": kind,
            "Content-Length": str(len(body.encode())),
            **({"Mcp-Session-Id": SESSION} if self.tools.has_session else {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the page has left
            self.wfile.write(body.encode())


@contextmanager
def tool_server(**options: Any) -> Iterator[ToolServer]:
    server = ToolServer(**options)
    listener = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"tools": server})
    )
    server.url = f"http://127.0.0.1:{listener.server_port}/mcp"
    thread = Thread(target=listener.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.cancelled.set()
        listener.shutdown()
        thread.join()
        listener.server_close()
