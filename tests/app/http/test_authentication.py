"""A request without a valid key is rejected."""

import logging
from collections.abc import Container
from hashlib import sha256

import httpx
import pytest
from pydantic import SecretStr
from starlette.types import Message, Receive, Scope, Send

from app.http.authentication import Authentication, client_for_key
from app.http.client import ANONYMOUS, VISITOR, Client
from app.settings.keys import read_keys
from tests.support.raw_http import running, split
from tests.support.rows import rows
from tests.support.speaker import speaking_app

pytestmark = pytest.mark.anyio

KEYS = ("sk-one", "sk-two")


class App:
    """Responds with OK, and records the clients."""

    def __init__(self) -> None:
        self.clients: list[Client] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.clients.append(scope["state"]["client"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"OK"})


class Guarded:
    """An app behind keys, and a client of it."""

    def __init__(
        self, *keys: str, share_prefix_cache: bool = False, open_paths: Container[str] = ()
    ) -> None:
        self.app = App()
        guarded = Authentication(self.app, keys, share_prefix_cache, open_paths=open_paths)
        self._transport = httpx.ASGITransport(guarded)

    async def get(self, path: str = "/v1/models", **headers: str) -> httpx.Response:
        named = [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ]
        async with httpx.AsyncClient(transport=self._transport) as client:
            return await client.get(f"http://test{path}", headers=named)

    async def client_with(self, **headers: str) -> Client:
        assert (await self.get(**headers)).status_code == 200
        return self.app.clients[-1]


@rows(
    "headers",
    [
        {"authorization": "Bearer sk-one"},
        {"authorization": "bearer   sk-one"},
        {"x_api_key": "sk-one"},
        {"authorization": "Bearer none", "x_api_key": "sk-one"},
        {"authorization": "Basic c2stb25l", "x_api_key": "sk-one"},
        {"x_api_key": "none", "authorization": "Bearer sk-one"},
    ],
)
async def test_a_valid_key_is_accepted(headers: dict[str, str]) -> None:
    server = Guarded(*KEYS)
    client = await server.client_with(**headers)
    assert client == client_for_key("sk-one", share_prefix_cache=False)


@rows(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sk-on"},
        {"authorization": "Bearer sk-one1"},
        {"authorization": "Bearer SK-ONE"},
        {"authorization": "sk-one"},
        {"authorization": "Basic sk-one"},
        {"authorization": "Bearer sk-one sk-two"},
        {"x_api_key": ""},
        {"x_api_key": "Bearer sk-one"},
        {"x_api_key": "é"},
        {"cookie": "sk-one"},
    ],
)
async def test_anything_else_is_rejected(headers: dict[str, str]) -> None:
    server = Guarded(*KEYS)
    response = await server.get(**headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert server.app.clients == []


async def test_more_keys_than_headers_for_them_are_not_compared() -> None:
    server = Guarded(*KEYS)
    both = {"authorization": "Bearer none", "x_api_key": "sk-one"}
    assert (await server.get(**both)).status_code == 200
    assert (await server.get(**both, X_API_Key="sk-one")).status_code == 401


async def test_each_key_is_another_client_that_does_not_reveal_it() -> None:
    server = Guarded(*KEYS)
    one, two = [await server.client_with(x_api_key=key) for key in KEYS]
    assert len({one.name, two.name, one.cache_salt, two.cache_salt, ""}) == 5
    digest = sha256(b"sk-one").hexdigest()
    assert one.name == digest[:8]
    # The salt is independent of the name, which is in the log.
    assert one.name not in one.cache_salt
    assert len(one.cache_salt) == 64


def test_the_salt_of_a_key_outlives_the_server() -> None:
    """With another one nothing would be found of what is on disk."""
    salt = client_for_key("sk-one", share_prefix_cache=False).cache_salt
    assert salt == "3e0bd9f455a3be65e790d9c87fea2039eea8d41b04176758b7889dc8df77998c"


async def test_cached_prefixes_are_shared_if_configured() -> None:
    server = Guarded(*KEYS, share_prefix_cache=True)
    one, two = [await server.client_with(x_api_key=key) for key in KEYS]
    assert one.cache_salt == two.cache_salt == ""
    assert one.name != two.name


async def test_without_keys_all_clients_are_anonymous() -> None:
    server = Guarded()
    assert await server.client_with() is ANONYMOUS
    assert await server.client_with(authorization="Bearer sk-one") is ANONYMOUS


@rows(
    ("path", "status"),
    [
        ("/health", 200),
        ("/ready", 200),
        ("/health/", 401),
        ("/healthy", 401),
        ("//health", 401),
        ("/v1/health", 401),
        ("/metrics", 401),
        ("/docs", 401),
        ("/openapi.json", 401),
        ("/", 401),
    ],
)
async def test_only_probes_need_no_key(path: str, status: int) -> None:
    server = Guarded(*KEYS)
    assert (await server.get(path)).status_code == status
    assert set(server.app.clients) <= {VISITOR}


@pytest.mark.parametrize("path", ["/health", "/page"])
async def test_a_body_needs_a_key_wherever_it_is_sent(path: str) -> None:
    """A visitor of an open path has no share of the memory for bodies."""
    server = Guarded(*KEYS, open_paths=("/page",))
    for headers in ({"content_length": "1"}, {"transfer_encoding": "chunked"}):
        assert (await server.get(path, **headers)).status_code == 401
        assert (await server.get(path, x_api_key="sk-one", **headers)).status_code == 200
    assert (await server.get(path, content_length="0")).status_code == 200
    one = client_for_key("sk-one", share_prefix_cache=False)
    assert server.app.clients == [one, one, VISITOR]


async def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(known: bytes, presented: bytes) -> bool:
        compared.append(len(known))
        return known == presented

    monkeypatch.setattr("app.http.authentication.hmac.compare_digest", compare)
    server = Guarded("a", "b" * 100, "c")
    for key in ("a", "b" * 100, "c", "d"):
        await server.get(x_api_key=key)
    assert compared == [32] * 12


async def test_web_sockets_are_closed_and_other_scopes_pass_all_middleware() -> None:
    received = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[str] = []

    async def receive() -> Message:
        return {"type": next(received)}

    async def send(message: Message) -> None:
        sent.append(message["type"])

    with speaking_app(api_keys=SecretStr("key")) as app:
        for kind in ("websocket", "lifespan"):
            await app({"type": kind, "path": "/health", "headers": []}, receive, send)
    assert sent == ["websocket.close", "lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        server = Guarded(*KEYS)
        await server.get(x_api_key="sk-one")
        response = await server.get(x_api_key="sk-wrong")
    assert "sk-" not in caplog.text
    assert "sk-" not in response.text


class TestOnTheWire:
    """The body of a rejected request is neither requested nor waited for."""

    def test_the_connection_ends_without_the_body(self) -> None:
        head = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
        with running(Authentication(App(), KEYS, False)) as site, site.connection() as connection:
            connection.send(head + b"Expect: 100-continue\r\n\r\n")
            status, fields, _ = split(connection.read(b"}}"))
        assert (status, fields["connection"]) == (401, "close")

    def test_a_body_that_was_received_is_dropped(self) -> None:
        head = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
        with running(Authentication(App(), KEYS, False)) as site:
            status, fields, _ = split(site.ask(head + b"a" * 9))
        assert (status, fields["connection"]) == (401, "close")

    def test_a_request_without_a_body_may_be_followed_by_another(self) -> None:
        head = b"GET /v1/x HTTP/1.1\r\nHost: x\r\n"
        with running(Authentication(App(), KEYS, False)) as site, site.connection() as connection:
            connection.send(head + b"\r\n")
            assert split(connection.read(b"}}"))[0] == 401
            connection.send(head + b"X-Api-Key: sk-one\r\nConnection: close\r\n\r\n")
            assert split(connection.read_all())[0] == 200

    def test_the_rejection_of_head_has_no_body(self) -> None:
        with running(Authentication(App(), KEYS, False)) as site:
            response = site.ask(b"HEAD /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        status, fields, body = split(response)
        assert (status, fields["www-authenticate"], body) == (401, "bearer", b"")


class TestKeysFile:
    def test_there_is_a_key_per_line(self) -> None:
        text = "# ours\n\n  sk-one  \nsk-two # not a comment\r\n"
        with pytest.raises(ValueError, match=r"^line 4: "):
            read_keys(text)
        assert read_keys(text.replace(" # not a comment", "")) == ["sk-one", "sk-two"]

    def test_an_empty_file_has_none(self) -> None:
        assert read_keys("\n# nothing\n") == []

    @rows("key", ["sk one", "sk\tone", "sk-é", "sk\x00one", "sk\x0cone", "sk\x7fone", "\xa0sk-one"])
    def test_a_key_that_no_header_can_carry_is_rejected_without_showing_it(self, key: str) -> None:
        with pytest.raises(ValueError, match=r"^line 2: ") as rejected:
            read_keys(f"sk-zero\n{key}\n")
        assert "sk" not in str(rejected.value)
        assert "one" not in str(rejected.value)
