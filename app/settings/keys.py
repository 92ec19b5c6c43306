"""The API keys of the settings: from variables and from a file."""

import re
from collections.abc import Callable, Iterable
from typing import Final

from pydantic import SecretStr

from app.settings.files import text_of
from app.settings.names import SettingsError, env_name
from app.settings.settings import Settings

KEY: Final = re.compile(r"[!-~]+")
_BLANK: Final = " \t\r"


def client_keys(settings: Settings) -> list[str]:
    """Return the API keys from all sources, admin keys included; without any the server asks for none.

    Raises:
        SettingsError: the file cannot be read, or a key is invalid.
    """
    keys = admin_keys(settings) + _listed_keys("api_keys", settings.api_keys)
    if settings.api_keys_file is None:
        return keys
    text = text_of("api_keys_file", settings.api_keys_file)
    return keys + _keys("api_keys_file", read_keys, text)


def admin_keys(settings: Settings) -> list[str]:
    """Return the API keys that may also watch the server.

    Raises:
        SettingsError: a key is invalid.
    """
    return _listed_keys("admin_keys", settings.admin_keys)


def _listed_keys(field: str, value: SecretStr) -> list[str]:
    """Return the comma-separated keys of a setting; an empty setting has none."""
    text = value.get_secret_value()
    return _keys(field, split_keys, text) if text else []


def _keys(field: str, read: Callable[[str], list[str]], text: str) -> list[str]:
    """Return the keys of a source; it must have some, or the server would be open to every client."""
    try:
        keys = read(text)
    except ValueError as error:
        raise SettingsError(f"{env_name(field)}: {error}") from None
    if not keys:
        raise SettingsError(f"{env_name(field)} holds no key")
    return keys


def read_keys(text: str) -> list[str]:
    """Return the keys of a file, one per line; blank lines and lines that begin with `#` are skipped.

    Raises:
        ValueError: a key has characters that an HTTP header cannot carry unchanged.
    """
    # Not splitlines, which also splits at control characters.
    lines = [line.strip(_BLANK) for line in text.split("\n")]
    return _checked(("" if line.startswith("#") else line for line in lines), "line")


def split_keys(text: str) -> list[str]:
    """Return the keys that commas separate; blank ones are skipped.

    Raises:
        ValueError: a key has characters that an HTTP header cannot carry unchanged.
    """
    return _checked((part.strip(_BLANK) for part in text.split(",")), "key")


def _checked(keys: Iterable[str], unit: str) -> list[str]:
    numbered = [(number, key) for number, key in enumerate(keys, 1) if key]
    for number, key in numbered:
        if not KEY.fullmatch(key):
            message = f"{unit} {number}: a key must be visible ASCII characters without spaces"
            raise ValueError(message)
    return [key for _, key in numbered]
