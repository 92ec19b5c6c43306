"""The API keys of the settings: from variables and from a file."""

from collections.abc import Callable

from pydantic import SecretStr

from app.http.authentication import read_keys, split_keys
from app.settings.files import text_of
from app.settings.names import SettingsError, env_name
from app.settings.settings import Settings


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
