"""Where the running server is, and the key for it: from flags, variables and the server's settings."""

import argparse
import os
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from app.commands.errors import CommandError
from app.settings import Settings, SettingsError, env_name, load_settings
from app.settings.keys import KEY, admin_keys, client_keys
from app.settings.names import KEY_VARIABLE

# Addresses that mean all of this machine's, and the ones by which a client reaches it.
_REACHED_AS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Server:
    """A running server; its URL has no `/v1` and no slash at the end."""

    url: str
    api_key: str | None = field(default=None, repr=False)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `find_server` reads."""
    host, port = env_name("host"), env_name("port")
    parser.add_argument(
        "--url",
        help=f"address of the server (default: that of {host} and {port}, http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key of the server (default: {KEY_VARIABLE}; without --url, else a key of the server's own "
        "settings). Others on this machine see a flag in the list of processes; a variable is safer.",
    )


def find_server(arguments: argparse.Namespace) -> Server:
    """Return the server that the flags name, else the one that the settings here would start.

    The keys of the settings are sent to no other address than theirs, and a key of OpenAI's to none.

    Raises:
        CommandError: the URL, the key or the settings are invalid.
    """
    key = _checked_key(arguments.api_key or os.environ.get(KEY_VARIABLE) or None)
    if arguments.url:
        return Server(_checked_url(arguments.url), key)
    try:
        settings = load_settings()
        return Server(_url_of(settings), key or _configured_key(settings))
    except SettingsError as error:
        raise CommandError("; ".join(str(error).splitlines())) from None


def _checked_key(key: str | None) -> str | None:
    if key is not None and not KEY.fullmatch(key):
        raise CommandError("a key must be visible ASCII characters without spaces")
    return key


def _checked_url(text: str) -> str:
    """Return the URL of a server, which may be given without `http://`, and with `/v1`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.query or parts.fragment or parts.username is not None:
        raise CommandError(f"--url must be like http://127.0.0.1:8000, not {text!r}")
    return url.rstrip("/").removesuffix("/v1")


def _url_of(settings: Settings) -> str:
    if settings.port == 0:
        message = f"{env_name('port')} is 0, any free port; --url must say which it is"
        raise CommandError(message)
    host = _REACHED_AS.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _configured_key(settings: Settings) -> str | None:
    """Return the first of the server's own keys, one of a client before one of an admin."""
    admins = admin_keys(settings)
    clients = [key for key in client_keys(settings) if key not in admins]
    return next(iter([*clients, *admins]), None)
