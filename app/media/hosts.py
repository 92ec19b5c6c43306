"""The hosts from which the server loads images: those that the operator lists, and no other."""

import re
from collections.abc import Iterable
from typing import Final

import httpx

from app.settings import SettingsError, env_name

DEFAULT_PORTS: Final = {"http": 80, "https": 443}

# In ASCII, as the parser of URLs writes it; a name that begins with a dot would look like a pattern.
_HOST: Final = re.compile(r"[a-z0-9_:-][a-z0-9_.:-]*")

# A name, without the dot at its end, and a port.
Origin = tuple[str, int]


def listed_origins(hosts: Iterable[str]) -> frozenset[Origin]:
    """Return what a list of hosts allows: of one without a port, those of HTTP and HTTPS.

    Raises:
        SettingsError: one is not a host.
    """
    return frozenset(origin for host in hosts for origin in _origins(host))


def origin_of(url: httpx.URL) -> Origin:
    """Return where a URL of HTTP or HTTPS leads."""
    port = DEFAULT_PORTS[url.scheme] if url.port is None else url.port
    return name_of(url), port


def name_of(url: httpx.URL) -> str:
    """Return the host of a URL: lower case, in ASCII, without the dot at its end."""
    return url.raw_host.decode("ascii").removesuffix(".")


def _origins(host: str) -> list[Origin]:
    try:
        url = httpx.URL(f"//{host}")
    except (httpx.InvalidURL, ValueError):
        raise _no_host(host) from None
    if not _HOST.fullmatch(name_of(url)) or str(url) != f"//{url.netloc.decode('ascii')}":
        raise _no_host(host)
    ports = DEFAULT_PORTS.values() if url.port is None else [url.port]
    return [(name_of(url), port) for port in ports]


def _no_host(host: str) -> SettingsError:
    return SettingsError(
        f"{env_name('media_domains')}: {host!r} is no host; write names like images.example.org, or name:port"
    )
