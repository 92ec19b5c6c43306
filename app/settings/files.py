"""Reads the files that settings name."""

from pathlib import Path
from stat import S_ISREG

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
        raise _unreadable(field, path, reason) from None


def check_file(field: str, path: Path) -> None:
    """Check that a field's file can be read, before it is, in pieces.

    Raises:
        SettingsError: it cannot.
    """
    try:
        # Opening a pipe would wait for its writer.
        if not S_ISREG(path.stat().st_mode):
            raise _unreadable(field, path, "it is no file")
        path.open("rb").close()
    except OSError as error:
        raise _unreadable(field, path, error.strerror) from None


def _unreadable(field: str, path: Path, reason: str | None) -> SettingsError:
    return SettingsError(f"{env_name(field)} cannot be read: {path}: {reason}")
