"""Keeps web pages in browsers on this network from using a server that asks for no key.

A page of any site can send requests to the reader's own machine.  What it must not do is have them
processed, and read the responses:

- If its name is made to point to this machine (DNS rebinding), page and server have the same origin, and
  all that differs is the name in the `Host` header.
- A form, an image, or a script without CORS cannot read the response, but the request has been processed
  by then.  Browsers say which page sends it, in `Origin` or `Sec-Fetch-Site`; a page cannot change either.
  What they may still do is lead their reader here, by a link.

Programs that are no browser send neither, and are not concerned.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.body_limit import RequestBody, send_rejection
from app.http.errors.rejections import ForeignOrigin, HostNotAllowed, Rejection
from app.http.errors.responses import CountRejection, error_response, ignore_rejection
from app.http.web_socket import sender

_ANY: Final = "*"
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@\[\]]+))(?::(\d*))?")
_ORIGIN: Final = re.compile(r"(https?)://(.*)")
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
# RFC 6762, RFC 8375, and what ICANN keeps for private use.
_PRIVATE_ZONES: Final = (".local", ".home.arpa", ".internal")
# `none` is the user's own doing, such as a bookmark.
_OTHER_SITES: Final = frozenset({"cross-site", "same-site"})


def is_loopback(host: str) -> bool:
    """Return whether a name or an address can only be this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_private(name: str) -> bool:
    """Return whether no name server of the internet has this name."""
    return "." not in name or name.endswith(_PRIVATE_ZONES)


def _split_host(value: str) -> tuple[str, str]:
    """Return the name and the port of a `Host` header, both empty if it is none."""
    match = _HOST.fullmatch(value.strip().lower())
    return ((match[1] or match[2]).removesuffix("."), match[3] or "") if match else ("", "")


@dataclass(frozen=True, slots=True)
class HostNames:
    """The names by which clients may address the server, loopback's included.

    names: `*.example.org` is every name below it.
    is_on_network: also addresses, and names that only a private network has: the name of a page of the
        internet is neither.
    """

    names: Collection[str] = ()
    is_on_network: bool = False

    def allow(self, value: str) -> bool:
        """Return whether a request with this `Host` may pass; no browser sends an empty one."""
        if not value:
            return True
        host, _ = _split_host(value)
        if not host:
            return False
        is_known = any(name[:2] == "*." and host.endswith(name[1:]) for name in self.names)
        if is_known or is_loopback(host) or host in self.names:
            return True
        return self.is_on_network and (_is_address(host) or _is_private(host))


def checked_names(bound: str, names: Sequence[str], *, has_keys: bool) -> HostNames | None:
    """Return what `Host` may be on a server that listens on `bound`; None for anything.

    Without names it is not checked where there are keys: a page does not know one.  By which names a
    server is known on a network it cannot know; a port of a container may be published on loopback only.
    """
    if _ANY in names or (not names and has_keys):
        return None
    known = frozenset(name.lower().removesuffix(".") for name in (*names, bound))
    return HostNames(known, is_on_network=not is_loopback(bound))


class BrowserGuard:
    """Rejects what browsers send for pages of other sites.

    hosts: the values that `Host` may have; None for any.
    origins: the origins of pages that may send requests; `*` is all, and None does not check them.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: HostNames | None,
        origins: Collection[str] | None,
        count_rejection: CountRejection = ignore_rejection,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = None if origins is not None and _ANY in origins else origins
        self._count_rejection = count_rejection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] in ("http", "websocket")
        rejection = self._rejection(scope) if is_checked else None
        if rejection is None:
            await self._app(scope, receive, send)
            return
        response = error_response(rejection, scope, self._count_rejection)
        await send_rejection(response, RequestBody(scope, receive), sender(scope, send))

    def _rejection(self, scope: Scope) -> Rejection | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self._hosts is not None and not self._hosts.allow(host):
            return HostNotAllowed(host)
        if self._origins is None or _is_navigation(scope.get("method", ""), headers):
            return None
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        is_foreign = site in _OTHER_SITES if origin is None else _is_foreign(origin, host)
        # A proxy may have changed `Host`; the browser has seen what the page's user sees.
        if not is_foreign or site == "same-origin" or origin in self._origins:
            return None
        return ForeignOrigin(origin or str(site))


def _is_navigation(method: str, headers: Mapping[bytes, str]) -> bool:
    """Return whether the browser opens what it gets as a page of its own, as for a link."""
    mode, destination = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    return (method, mode, destination) == ("GET", "navigate", "document")


def _is_foreign(origin: str, host: str) -> bool:
    """Return whether an origin is a web page's of another site.

    Only such pages have the schemes `http` and `https`, or `null`.  Others (`app://`, `tauri://`,
    `vscode-webview://`, `chrome-extension://`) belong to programs that their user has installed, which
    need no browser to send requests.
    """
    if origin == "null":
        return True
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None:
        return False
    return _without_default(match[2], match[1]) != _without_default(host, match[1])


def _without_default(host: str, scheme: str) -> tuple[str, str]:
    name, port = _split_host(host)
    return name, "" if port == _DEFAULT_PORTS[scheme] else port
