"""Loads an image from a listed host, and from no other however its URL is written.

A client that names a URL makes the server connect to it (SSRF), so: the host is one that the operator lists; its
name is resolved once, all of its addresses are public, and the connection is made to one of those, with the name
for TLS and in `Host`; no redirect is followed, and no proxy of the environment is used.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Final

import httpx

from app.http.errors.invalid_requests import InvalidImage
from app.media.addresses import Address, is_public, resolve
from app.media.hosts import DEFAULT_PORTS, Origin, name_of, origin_of
from app.settings import env_name

_OK: Final = 200
# The limit in characters for text of the client that a message repeats.
_MAX_SHOWN: Final = 100
_HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity"}

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


@cache
def default_tls() -> ssl.SSLContext:
    """Return the context of all connections; reading the certificates takes a while."""
    return httpx.create_ssl_context(trust_env=False)


class ImageFetcher:
    """Loads images of up to `max_bytes` from some hosts, each within `timeout` seconds.

    resolve_host, is_allowed, tls: how a name is resolved, which addresses may be dialled, and which certificates
        are trusted; others are for tests.
    """

    def __init__(
        self,
        origins: frozenset[Origin],
        *,
        max_bytes: int,
        timeout: float,
        resolve_host: Resolve = resolve,
        is_allowed: Callable[[Address], bool] = is_public,
        tls: Callable[[], ssl.SSLContext] = default_tls,
    ) -> None:
        self._origins = origins
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._resolve = resolve_host
        self._is_allowed = is_allowed
        self._tls = tls

    async def fetch(self, text: str, param: str) -> bytes:
        """Return the file that a URL names.

        Raises:
            InvalidImage: its host is not listed or not public, or does not return such a file in time.
        """
        url = self._checked(text, param)
        try:
            async with asyncio.timeout(self._timeout):
                addresses = await self._addresses(url, param)
                return await self._load(url, addresses, param)
        except TimeoutError:
            setting = env_name("media_timeout")
            message = f"the image was not loaded within {self._timeout:g} seconds ({setting})"
            raise InvalidImage(param, message) from None
        except (httpx.HTTPError, OSError, UnicodeError):
            message = f"the image could not be loaded from {_shown(name_of(url))}"
            raise InvalidImage(param, message) from None

    def _checked(self, text: str, param: str) -> httpx.URL:
        """Return the URL with its host as it is listed; nothing parses it again."""
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError):
            raise InvalidImage(param, "the URL of the image is not valid") from None
        if url.scheme not in DEFAULT_PORTS:
            raise InvalidImage(
                param,
                "the URL of an image begins with data:, http:// or https://, and no other scheme",
            )
        if url.userinfo:
            raise InvalidImage(param, "the URL of an image must not hold a user or a password")
        name, port = origin_of(url)
        if (name, port) not in self._origins:
            raise InvalidImage(
                param,
                f"the server loads no images from {_shown(name)}, port {port}: the hosts are those of "
                f"{env_name('media_domains')}; send the image in a data: URL",
            )
        return url.copy_with(host=name)

    async def _addresses(self, url: httpx.URL, param: str) -> Sequence[Address]:
        name, port = origin_of(url)
        addresses = await self._resolve(name, port)
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise InvalidImage(param, f"the host {_shown(name)} has an address that is not public")
        return addresses

    async def _load(self, url: httpx.URL, addresses: Sequence[Address], param: str) -> bytes:
        """Return what the first address that can be connected to has; each gets an equal part of the time."""
        timeout = httpx.Timeout(None, connect=self._timeout / len(addresses))
        # A client of its own: kept connections would be known by address only, and the name is what TLS checks.
        async with httpx.AsyncClient(
            verify=self._tls(), trust_env=False, follow_redirects=False, timeout=timeout
        ) as client:
            for address in addresses[:-1]:
                with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                    return await self._load_from(client, url, address, param)
            return await self._load_from(client, url, addresses[-1], param)

    async def _load_from(
        self, client: httpx.AsyncClient, url: httpx.URL, address: Address, param: str
    ) -> bytes:
        async with client.stream(
            "GET",
            url.copy_with(host=str(address)),
            headers={**_HEADERS, "Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": name_of(url)},
        ) as response:
            self._check(response, param)
            data = bytearray()
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    raise too_large(self._max_bytes, param)
            return bytes(data)

    def _check(self, response: httpx.Response, param: str) -> None:
        if response.is_redirect:
            raise InvalidImage(param, "the host redirects, which is not followed")
        if response.status_code != _OK:
            message = f"the host answers with the status {response.status_code}"
            raise InvalidImage(param, message)
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise InvalidImage(param, "the host sends the image compressed (Content-Encoding)")
        if int(response.headers.get("Content-Length", 0)) > self._max_bytes:
            raise too_large(self._max_bytes, param)


def too_large(max_bytes: int, param: str) -> InvalidImage:
    """Return the error of a file with more bytes."""
    limit = f"{max_bytes >> 20} MiB ({env_name('max_image_mib')})"
    return InvalidImage(param, f"the image is larger than the limit of {limit}")


def _shown(host: str) -> str:
    return repr(host[:_MAX_SHOWN])
