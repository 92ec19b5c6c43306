"""Images of URLs: from listed hosts on real sockets, and from nowhere else."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import pytest

from app.http.errors.invalid_requests import InvalidImage
from app.media.addresses import Address
from app.media.fetch import ImageFetcher, default_tls
from app.media.hosts import listed_origins
from tests.support.raw_http import LONG, SHORT
from tests.support.rows import rows

pytestmark = pytest.mark.anyio

MIB: Final = 1 << 20
LOOPBACK: Final = ip_address("127.0.0.1")
PARAM: Final = "messages.0.content.1"


class StandIn:
    """A server on loopback that sends fixed bytes; it closes the connection, or leaves that to the client."""

    def __init__(self, response: bytes, *, closes: bool) -> None:
        self.heads: list[str] = []
        self.port = 0
        self._response = response
        self._closes = closes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self._response)
            await writer.drain()
            if not self._closes:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def stand_in(
    response: bytes, tls: ssl.SSLContext | None = None, *, closes: bool = True
) -> AsyncIterator[StandIn]:
    made = StandIn(response, closes=closes)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


class Names:
    """A resolver with a list of answers, of which each is given once; the last one again and again."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.asked: list[tuple[str, int]] = []
        self._answers = [list(map(ip_address, answer)) for answer in answers]

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append((host, port))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def fetcher(*hosts: str, names: Any, timeout: float = LONG, **options: Any) -> ImageFetcher:
    options = {"is_allowed": lambda address: address == LOOPBACK} | options
    return ImageFetcher(
        listed_origins(hosts), max_bytes=MIB, timeout=timeout, resolve_host=names, **options
    )


async def rejection(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(InvalidImage) as caught:
        await fetcher.fetch(url, PARAM)
    assert caught.value.param == PARAM
    return str(caught.value)


def ok(body: bytes, *fields: str) -> bytes:
    head = "\r\n".join(["HTTP/1.1 200 OK", *fields, "Connection: close", "", ""])
    return head.encode() + body


async def test_an_image_is_loaded_from_the_address_with_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with stand_in(ok(b"image")) as server:
        host = f"images.example:{server.port}"
        # Another address for the same name, as when a name is rebound.
        names = Names(["127.0.0.1"], ["10.0.0.1"])
        loaded = await fetcher(host, names=names).fetch(
            f"http://Images.Example.:{server.port}/a?b#c", PARAM
        )
    assert loaded == b"image"
    assert names.asked == [("images.example", server.port)]
    request, *fields = server.heads[0].lower().split("\r\n")
    assert request == "get /a?b http/1.1"
    assert f"host: {host}" in fields
    assert "accept-encoding: identity" in fields


LISTED: Final = ("images.example", "local.example:8080", "127.0.0.1", "b\u00fccher.example")
UNLISTED: Final = r"the server loads no images from '.*', port -?\d+: .*MLX_SERVER_MEDIA_DOMAINS"
NOT_PUBLIC: Final = "has an address that is not public"
OTHER_SCHEME: Final = "begins with data:, http:// or https://"


@rows(
    ("url", "addresses", "reason"),
    [
        # No host of the list.
        ("http://other.example/a", ["8.8.8.8"], UNLISTED),
        ("http://images.example.evil.example/a", ["8.8.8.8"], UNLISTED),
        ("http://evil.images.example/a", ["8.8.8.8"], UNLISTED),
        ("http://images.example../a", ["8.8.8.8"], UNLISTED),
        ("http://images%2eexample/a", ["8.8.8.8"], UNLISTED),
        ("http://localhost/a", ["127.0.0.1"], UNLISTED),
        ("http://localhost./a", ["127.0.0.1"], UNLISTED),
        ("http://2130706433/", ["127.0.0.1"], UNLISTED),
        ("http://0x7f.1/", ["127.0.0.1"], UNLISTED),
        ("http://0177.0.0.01/", ["127.0.0.1"], "not valid"),
        ("http://127.1/", ["127.0.0.1"], UNLISTED),
        ("http://169.254.169.254/latest", ["169.254.169.254"], UNLISTED),
        ("http://[::1]/", ["::1"], UNLISTED),
        ("http://[::ffff:127.0.0.1]/", ["127.0.0.1"], UNLISTED),
        ("http://[fe80::1%25eth0]/", ["fe80::1"], UNLISTED),
        ("http:///a", ["127.0.0.1"], UNLISTED),
        ("http:images.example/a", ["8.8.8.8"], UNLISTED),
        ("http://evil.example\\@images.example/", ["8.8.8.8"], "user or a password"),
        ("http://evil.example#@images.example/", ["8.8.8.8"], UNLISTED),
        ("http://evil.example?@images.example/", ["8.8.8.8"], UNLISTED),
        # Other ports.
        ("http://images.example:22/a", ["8.8.8.8"], UNLISTED),
        ("http://images.example:0/a", ["8.8.8.8"], UNLISTED),
        ("http://images.example:-1/a", ["8.8.8.8"], UNLISTED),
        ("http://images.example:8080/a", ["8.8.8.8"], UNLISTED),
        ("http://local.example/a", ["8.8.8.8"], UNLISTED),
        # Not as URLs are.
        ("http://user@images.example/", ["8.8.8.8"], "must not hold a user or a password"),
        ("http://:secret@images.example/", ["8.8.8.8"], "must not hold a user or a password"),
        ("http://images.example:80:81/", ["8.8.8.8"], "not valid"),
        ("http://images.example\r\nX: y/", ["8.8.8.8"], "not valid"),
        ("http://images.example/\ud800", ["8.8.8.8"], "not valid"),
        ("http://" + "a" * 70_000, ["8.8.8.8"], "not valid"),
        # Other schemes.
        ("file:///etc/passwd", [], OTHER_SCHEME),
        ("file://images.example/a", [], OTHER_SCHEME),
        ("/etc/passwd", [], OTHER_SCHEME),
        ("//images.example/a", [], OTHER_SCHEME),
        ("ftp://images.example/a", [], OTHER_SCHEME),
        ("gopher://images.example/a", [], OTHER_SCHEME),
        ("unix:/run/a", [], OTHER_SCHEME),
        ("", [], OTHER_SCHEME),
        # Listed, and of a private network.
        ("http://images.example/", ["10.0.0.1"], NOT_PUBLIC),
        ("http://images.example./", ["127.0.0.1"], NOT_PUBLIC),
        ("https://IMAGES.example/", ["8.8.8.8", "192.168.0.1"], NOT_PUBLIC),
        ("http://images.example:443/", ["169.254.169.254"], NOT_PUBLIC),
        ("http://local.example:8080/", ["100.64.0.1"], NOT_PUBLIC),
        ("http://xn--bcher-kva.example/", ["::1"], NOT_PUBLIC),
        ("http://b\u00fccher.example/", ["::ffff:10.0.0.1"], NOT_PUBLIC),
        ("http://B\u00dcCHER\u3002example/", ["2002:a00:1::1"], NOT_PUBLIC),
        ("http://127.0.0.1/", ["127.0.0.1"], NOT_PUBLIC),
        ("http://images.example/", [], NOT_PUBLIC),
    ],
)
async def test_the_server_connects_to_nothing_private_for_a_client(
    url: str, addresses: list[str], reason: str
) -> None:
    names = Names(addresses)
    strict = ImageFetcher(listed_origins(LISTED), max_bytes=MIB, timeout=LONG, resolve_host=names)
    with pytest.raises(InvalidImage, match=reason):
        await strict.fetch(url, PARAM)
    # A name that is not listed is not even looked up.
    assert len(names.asked) == (reason == NOT_PUBLIC)


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return ok(body + b"0\r\n\r\n", "Transfer-Encoding: chunked")


LARGE: Final = r"larger than the limit of 1 MiB \(MLX_SERVER_MAX_IMAGE_MIB\)"


@rows(
    ("response", "reason"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "redirects"),
        (b"HTTP/1.1 301 Moved\r\nContent-Length: 0\r\n\r\n", "redirects"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 206 Partial\r\nContent-Length: 0\r\n\r\n", "status 206"),
        (ok(b"", f"Content-Length: {MIB + 1}"), LARGE),
        (ok(bytes(MIB + 1)), LARGE),
        (chunked(bytes(MIB), b"a"), LARGE),
        (chunked(*[bytes(1 << 16)] * 40), LARGE),
        (ok(b"", "Content-Encoding: gzip"), "compressed"),
        (ok(b"", "Content-Encoding: br, identity"), "compressed"),
        (ok(b"abc", "Content-Length: 10"), "could not be loaded from 'images.example'"),
        (ok(b"", "Content-Length: x"), "could not be loaded"),
        (b"SSH-2.0-OpenSSH_9\r\n", "could not be loaded"),
        (b"", "could not be loaded"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", "could not be loaded"),
    ],
)
async def test_a_response_that_is_no_image_is_rejected(response: bytes, reason: str) -> None:
    async with stand_in(response) as server:
        host = f"images.example:{server.port}"
        fetching = fetcher(host, names=Names(["127.0.0.1"]))
        with pytest.raises(InvalidImage, match=reason):
            await fetching.fetch(f"http://{host}/", PARAM)


@rows(
    ("response", "data"),
    [
        (chunked(b"ab", b"c"), b"abc"),
        (ok(b"abc", "Content-Length: 3", "Content-Encoding: IDENTITY"), b"abc"),
        (ok(bytes(MIB), f"Content-Length: {MIB}"), bytes(MIB)),
        (ok(b"", "Content-Length: 0"), b""),
    ],
)
async def test_a_body_is_returned_as_it_is(response: bytes, data: bytes) -> None:
    async with stand_in(response) as server:
        host = f"images.example:{server.port}"
        loaded = await fetcher(host, names=Names(["127.0.0.1"])).fetch(f"http://{host}/", PARAM)
    assert loaded == data


async def never(host: str, port: int) -> Sequence[Address]:
    await asyncio.Event().wait()
    raise AssertionError


@rows(
    ("response", "names"),
    [
        (b"", never),
        (b"", Names(["127.0.0.1"])),
        (b"HTTP/1.1 200 OK\r\n", Names(["127.0.0.1"])),
        (ok(b"ab", "Content-Length: 3"), Names(["127.0.0.1"])),
    ],
)
async def test_the_time_is_that_of_name_connection_and_body_together(
    response: bytes, names: Any
) -> None:
    async with stand_in(response, closes=False) as server:
        host = f"images.example:{server.port}"
        waiting = fetcher(host, names=names, timeout=SHORT)
        assert await rejection(waiting, f"http://{host}/") == (
            f"the image was not loaded within {SHORT:g} seconds (MLX_SERVER_MEDIA_TIMEOUT)"
        )


async def test_the_next_address_is_dialled_where_one_cannot_be_reached() -> None:
    async with stand_in(ok(b"image")) as server:
        host = f"images.example:{server.port}"
        names = Names(["::1", "127.0.0.1"])
        fetching = fetcher(host, names=names, is_allowed=lambda address: address.is_loopback)
        assert await fetching.fetch(f"http://{host}/", PARAM) == b"image"


async def test_a_name_without_an_address_says_so() -> None:
    async def unknown(host: str, port: int) -> Sequence[Address]:
        raise OSError("internals of a resolver")

    reason = await rejection(fetcher("a.example", names=unknown), "http://a.example/")
    assert reason == "the image could not be loaded from 'a.example'"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a file with a certificate of images.example and its key."""
    path = tmp_path / "certificate.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=test"
    name = "-addext subjectAltName=DNS:images.example"
    command = ["openssl", *made.split(), *name.split(), "-keyout", "-", "-out", "-"]
    path.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
async def test_the_certificate_is_that_of_the_name(certificate: Path) -> None:
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate)
    ours = ssl.create_default_context(cafile=str(certificate))
    names_asked: list[str | None] = []
    theirs.sni_callback = lambda _socket, name, _context: names_asked.append(name)
    async with stand_in(ok(b"image"), theirs) as server:
        hosts = [f"{name}.example:{server.port}" for name in ("images", "other")]
        fetching = fetcher(*hosts, names=Names(["127.0.0.1"]), tls=lambda: ours)
        assert await fetching.fetch(f"https://{hosts[0]}/", PARAM) == b"image"
        assert "could not be loaded" in await rejection(fetching, f"https://{hosts[1]}/")
    assert names_asked == ["images.example", "other.example"]
    assert f"Host: {hosts[0]}" in server.heads[0].split("\r\n")


def test_certificates_are_checked_and_read_once() -> None:
    assert default_tls().verify_mode == ssl.CERT_REQUIRED and default_tls().check_hostname
    assert default_tls() is default_tls()
