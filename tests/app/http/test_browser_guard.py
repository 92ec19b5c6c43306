"""What a browser sends for a page of another site is rejected, unless the operator allows it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx
import pytest
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from app.http.browser_guard import BrowserGuard, HostNames, checked_names, is_loopback
from app.settings import Settings
from app.settings.keys import client_keys
from tests.support.raw_http import Site, running, split
from tests.support.rows import rows
from tests.support.speaker import speaking_app

KEYS: Final = SecretStr("sk-one")
CHAT: Final = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


@contextmanager
def site(**settings: Any) -> Iterator[Site]:
    """Serve the whole app on a real socket."""
    with speaking_app(**settings) as app, running(app) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[Site]:
    """Return a server without settings, which the tests do not change."""
    with site() as made:
        yield made


def request(
    method: str = "GET",
    path: str = "/v1/models",
    *headers: str,
    host: str = "localhost",
    content: bytes = b"",
    content_type: str = "application/json",
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    if content:
        lines += [f"Content-Type: {content_type}", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def chat(*headers: str, host: str = "localhost", content_type: str = "application/json") -> bytes:
    path = "/v1/chat/completions"
    return request("POST", path, *headers, host=host, content=CHAT, content_type=content_type)


def status(site: Site, data: bytes) -> int:
    return split(site.ask(data))[0]


class TestHost:
    """A server on loopback without keys answers to loopback's names only."""

    @rows(
        "host",
        [
            "localhost",
            "localhost:8000",
            "LocalHost:1",
            "localhost.",
            "localhost.:8000",
            "chat.localhost:8000",
            "127.0.0.1:8000",
            "127.9.8.7",
            "[::1]:8000",
            "[::ffff:127.0.0.1]",
            "",
        ],
    )
    def test_names_of_loopback_are_its_own(self, host: str) -> None:
        names = checked_names("127.0.0.1", [], has_keys=False)
        assert names is not None
        assert names.allow(host)

    @rows(
        "host",
        [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "evil-localhost",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "localhost:8000@evil.example",
            "localhost evil.example",
            "localhost:http",
            "localhost:8000:1",
            "[::1",
            "::1",
            "[localhost]",
            "[::1].evil.example",
            "127.1",
            "2130706433",
            "0.0.0.0:8000",
            "192.168.1.5",
            "[fe80::1]",
            ".",
        ],
    )
    def test_others_are_not(self, host: str) -> None:
        names = checked_names("::1", [], has_keys=False)
        assert names is not None
        assert not names.allow(host)

    def test_a_page_whose_name_points_here_gets_a_403_that_names_the_setting(
        self, server: Site
    ) -> None:
        code, fields, body = split(server.ask(request(host="evil.example:8000", path="/v1/models")))
        posted = status(server, chat("Origin: http://evil.example:8000", host="evil.example"))
        anthropic = json.loads(
            split(server.ask(request("POST", "/v1/messages", host="evil.example")))[2]
        )
        assert status(server, request()) == 200
        assert status(server, chat("X-Forwarded-Host: evil.example")) == 200
        assert status(server, request("GET", "/health", host="evil.example")) == 403
        assert (code, posted) == (403, 403)
        error = json.loads(body)["error"]
        assert error["code"] == "host_not_allowed"
        assert "'evil.example:8000'" in error["message"]
        assert "MLX_SERVER_ALLOWED_HOSTS" in error["message"]
        assert "x-request-id" in fields
        assert anthropic["error"]["type"] == "permission_error"

    def test_a_forwarded_name_does_not_count(self, server: Site) -> None:
        forged = request("GET", "/v1/models", "X-Forwarded-Host: localhost", host="a.example")
        assert status(server, forged) == 403

    def test_the_name_in_a_target_leads_nowhere(self, server: Site) -> None:
        assert status(server, request("GET", "http://evil.example/v1/models")) == 404

    def test_a_client_of_http_1_0_needs_no_host(self, server: Site) -> None:
        assert status(server, b"GET /v1/models HTTP/1.0\r\n\r\n") == 200

    def test_a_long_or_strange_name_makes_a_short_message(self, server: Site) -> None:
        _, _, body = split(server.ask(request(host="\xe9" * 9000)))
        assert len(body) < 1000

    @rows(
        ("settings", "host", "allowed"),
        [
            ({"allowed_hosts": "chat.example, *.Example.org"}, "CHAT.example:80", True),
            ({"allowed_hosts": "chat.example, *.Example.org"}, "a.b.example.org", True),
            ({"allowed_hosts": "chat.example, *.Example.org"}, "example.org", False),
            ({"allowed_hosts": "chat.example, *.Example.org"}, "badexample.org", False),
            ({"allowed_hosts": "*.internal"}, "host.docker.internal", True),
            ({"allowed_hosts": "chat.example"}, "host.docker.internal", False),
            ({"allowed_hosts": "chat.example"}, "llm", False),
            ({"allowed_hosts": "chat.example"}, "localhost", True),
            ({"allowed_hosts": "chat.example", "api_keys": KEYS}, "evil.example", False),
            ({"allowed_hosts": "*"}, "evil.example", True),
            ({"api_keys": KEYS}, "evil.example", True),
            ({"host": "0.0.0.0", "api_keys": KEYS}, "evil.example", True),
            ({"host": "0.0.0.0"}, "llm:8000", True),
            ({"host": "0.0.0.0"}, "10.1.2.3:8000", True),
            ({"host": "0.0.0.0"}, "localhost:8000", True),
            ({"host": "0.0.0.0"}, "", True),
            ({"host": "0.0.0.0"}, "llm.default.svc.cluster.local", True),
            ({"host": "::"}, "host.docker.internal:8000", True),
            ({"host": "::"}, "evil.example", False),
            ({"host": "::"}, "evil.example.", False),
            ({"host": "0.0.0.0"}, "evillocal.example", False),
            ({"host": "0.0.0.0"}, "llm@evil.example", False),
            ({"host": "", "allowed_hosts": "llm"}, "llm evil.example", False),
            ({"host": "0.0.0.0", "allowed_hosts": "*"}, "evil.example", True),
            ({"host": "0.0.0.0", "allowed_hosts": "llm"}, "llm:8000", True),
            ({"host": "0.0.0.0", "allowed_hosts": "llm"}, "evil.example", False),
            ({"host": "0.0.0.0", "allowed_hosts": "llm"}, "10.1.2.3:8000", True),
            ({"host": "box.example", "allowed_hosts": "llm"}, "box.example:8000", True),
            ({"host": "localhost"}, "10.1.2.3", False),
        ],
    )
    def test_the_operator_decides(
        self, settings: dict[str, Any], host: str, *, allowed: bool
    ) -> None:
        made = Settings.model_construct(**settings)
        has_keys = bool(client_keys(made))
        names = checked_names(made.host, made.allowed_host_names, has_keys=has_keys)
        assert (names is None or names.allow(host)) == allowed

    @rows(
        ("host", "expected"),
        [
            ("127.0.0.1", True),
            ("::1", True),
            ("a.localhost", True),
            ("0.0.0.0", False),
            ("", False),
        ],
    )
    def test_where_a_server_listens(self, host: str, *, expected: bool) -> None:
        assert is_loopback(host) == expected


class TestOrigin:
    """Without keys, no page of another site may have anything changed or computed."""

    @rows(
        "headers",
        [
            ["Origin: https://evil.example"],
            ["Origin: http://localhost:3000"],
            ["Origin: https://localhost.evil.example"],
            ["Origin: null"],
            ["Origin: http://"],
            ["Origin: HTTPS://EVIL.example"],
            ["Origin: https://evil.example", "Sec-Fetch-Site: cross-site"],
            ["Sec-Fetch-Site: cross-site"],
            ["Sec-Fetch-Site: same-site"],
        ],
    )
    @rows("content_type", ["application/json", "text/plain"])
    def test_a_page_of_another_site_is_refused(
        self, server: Site, headers: list[str], content_type: str
    ) -> None:
        code, fields, body = split(server.ask(chat(*headers, content_type=content_type)))
        assert code == 403
        error = json.loads(body)["error"]
        assert error["code"] == "origin_not_allowed"
        assert "MLX_SERVER_CORS_ORIGINS" in error["message"]
        assert "access-control-allow-origin" not in fields

    @rows(
        "headers",
        [
            [],
            ["Origin: http://localhost"],
            ["Origin: http://LOCALHOST:80", "Sec-Fetch-Site: same-origin"],
            ["Origin: https://localhost:443"],
            # A proxy has replaced the name of the host.
            ["Origin: https://chat.example", "Sec-Fetch-Site: same-origin"],
            ["Sec-Fetch-Site: none"],
            # Programs on this machine.
            ["Origin: app://obsidian.md"],
            ["Origin: file://"],
            ["Origin: tauri://localhost"],
            ["Origin: vscode-webview://1a2b"],
            ["Origin: chrome-extension://abc"],
        ],
    )
    def test_the_servers_own_page_and_programs_are_not_concerned(
        self, server: Site, headers: list[str]
    ) -> None:
        assert status(server, chat(*headers)) == 200

    @rows(
        ("origins", "origin", "expected"),
        [
            ("https://chat.example", "https://chat.example", 200),
            ("https://chat.example", "https://evil.example", 403),
            ("https://chat.example, null", "null", 200),
            ("*", "https://any.example", 200),
        ],
    )
    def test_the_operator_names_pages_that_may(
        self, origins: str, origin: str, expected: int
    ) -> None:
        with site(cors_origins=origins) as server:
            code, fields, _ = split(server.ask(chat(f"Origin: {origin}")))
        assert code == expected
        assert ("access-control-allow-origin" in fields) == (expected == 200)

    def test_a_page_knows_no_key(self) -> None:
        origin = "Origin: https://evil.example"
        with site(api_keys=KEYS) as server:
            assert status(server, chat(origin)) == 401
            assert status(server, chat(origin, "Authorization: Bearer sk-one")) == 200
        with site(api_keys=KEYS, cors_origins="https://chat.example") as server:
            code, fields, _ = split(server.ask(chat("Origin: https://chat.example")))
            assert (code, "access-control-allow-origin" in fields) == (401, True)

    @rows("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
    @rows(
        "headers",
        [
            ["Origin: https://evil.example"],
            ["Origin: null"],
            ["Sec-Fetch-Site: cross-site"],
            ["Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"],
            # A frame is no page of its own.
            ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"],
            ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors", "Sec-Fetch-Dest: document"],
        ],
    )
    def test_nothing_is_read_for_it_either(
        self, server: Site, method: str, headers: list[str]
    ) -> None:
        assert status(server, request(method, "/v1/responses/resp_1", *headers)) == 403

    def test_a_link_from_another_site_leads_here(self, server: Site) -> None:
        link = [
            "Sec-Fetch-Site: cross-site",
            "Sec-Fetch-Mode: navigate",
            "Sec-Fetch-Dest: document",
        ]
        assert status(server, request("GET", "/v1/models", *link)) == 200
        assert status(server, chat(*link)) == 403

    def test_programs_and_the_servers_own_page_read(self) -> None:
        with site(cors_origins="https://chat.example") as server:
            for headers in (
                [],
                ["Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors", "Sec-Fetch-Dest: empty"],
                ["Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"],
                ["Origin: https://chat.example", "Sec-Fetch-Site: cross-site"],
                ["Origin: app://obsidian.md", "Sec-Fetch-Site: cross-site"],
            ):
                assert status(server, request("GET", "/v1/models", *headers)) == 200

    def test_the_body_is_not_waited_for(self, server: Site) -> None:
        head = chat("Origin: null")[: -len(CHAT)]
        code, fields, _ = split(server.ask(head))
        assert (code, fields["connection"]) == (403, "close")


def test_a_page_of_an_allowed_origin_may_ask_a_server_on_its_readers_network() -> None:
    origin = "Origin: https://chat.example"
    asks = ("Access-Control-Request-Method: POST", "Access-Control-Request-Private-Network: true")
    with site(cors_origins="https://chat.example") as server:
        answer = server.ask(request("OPTIONS", "/v1/models", origin, *asks))
        code, fields, _ = split(answer)
        foreign = request("OPTIONS", "/v1/models", "Origin: https://evil.example", *asks)
        assert status(server, foreign) == 400
    assert (code, fields["access-control-allow-private-network"]) == (200, "true")
    with site(cors_origins="*") as server:
        assert status(server, request("OPTIONS", "/v1/models", origin, *asks)) == 400


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/version", "/load", "/v1/models", "/v1/models/m/n"]
)
def test_the_head_of_what_is_read_comes_without_its_body(server: Site, path: str) -> None:
    server.ask(chat())
    read, head = (split(server.ask(request(method, path))) for method in ("GET", "HEAD"))
    assert head[0] == read[0]
    assert head[1]["content-type"] == read[1]["content-type"]
    assert (len(read[2]) > 0, head[2]) == (True, b"")


@pytest.mark.anyio
async def test_a_rejection_is_sent_without_a_network() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is not called")

    transport = httpx.ASGITransport(BrowserGuard(app, HostNames(), ()))
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await client.get("http://evil.example/v1/messages")).status_code == 403
