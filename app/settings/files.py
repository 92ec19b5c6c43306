"""Reads the files that settings name."""

from pathlib import Path

from app.settings.names import SettingsError, env_name


def text_of(field: str, path: Path) -> str:
    """Return the text of a field's file.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{env_name(field)} cannot be read: {path}: {reason}") from None
