"""Sealed values: texts that clients keep for the server and send back unchanged, such as reasoning.

A sealed value contains its text and a signature (HMAC-SHA256, RFC 2104), so the server stores nothing
and detects forged values.  The text is not secret: the client has received it before.
"""

import base64
import binascii
import hmac
import os
import secrets
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Final

from app.storage.disk.database import StorageError, sync_folder

_NUM_KEY_BYTES: Final = 32
_NUM_SIGNATURE_BYTES: Final = 32
_KEY_FILE: Final = "signing.key"
_MAX_UTF8_BYTES: Final = 4  # for one character

# The limit of a body in which the text is sent in full: a sealed value is compressed.
MAX_CHARACTERS: Final = 4 << 20


class ForgedValue(ValueError):
    """The value was not sealed by this server, or not for this purpose."""


class SealedTooLong(ValueError):
    """The text of a sealed value is longer than allowed."""


class Sealer:
    """Signs texts with one key.

    purpose: the use of the value; a value that was sealed for another purpose counts as forged.
    """

    def __init__(self, key: bytes) -> None:
        self._key: Final = key

    def seal(self, purpose: str, text: str) -> str:
        """Return a text of ASCII letters, digits, `-`, `_` and `=` (RFC 4648, section 5)."""
        content = zlib.compress(text.encode())
        return base64.urlsafe_b64encode(self._signature(purpose, content) + content).decode()

    def unseal(self, purpose: str, sealed: str, max_characters: int = MAX_CHARACTERS) -> str:
        """Return the text.

        Raises:
            ForgedValue: the value is not one that `seal` returned for this purpose.
            SealedTooLong: the text has more characters.
        """
        try:
            value = base64.b64decode(sealed, altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise ForgedValue from None
        signature, content = value[:_NUM_SIGNATURE_BYTES], value[_NUM_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(purpose, content)):
            raise ForgedValue
        # No more is decompressed than so many characters can take.
        max_bytes = max_characters * _MAX_UTF8_BYTES
        encoded = zlib.decompressobj().decompress(content, max_bytes + 1)
        if len(encoded) > max_bytes or len(text := encoded.decode()) > max_characters:
            raise SealedTooLong
        return text

    def _signature(self, purpose: str, content: bytes) -> bytes:
        return hmac.digest(self._key, purpose.encode() + b"\0" + content, sha256)


def load_key(folder: Path | None) -> bytes:
    """Return the key of an existing folder, so that sealed values outlive the server.

    The first start creates the key; without a folder the key lasts as long as the process.

    Raises:
        OSError: the folder cannot be written to, or the key cannot be read.
        StorageError: the file is too short for a key, so that values could be forged.
    """
    if folder is None:
        return secrets.token_bytes(_NUM_KEY_BYTES)
    path = folder / _KEY_FILE
    if not path.exists():
        _create(path)
    key = path.read_bytes()
    if len(key) != _NUM_KEY_BYTES:
        fault = f"{path} has {len(key)} bytes, and a key has {_NUM_KEY_BYTES}"
        raise StorageError(f"{fault}; move the file away, and a new one is made")
    return key


def _create(path: Path) -> None:
    """Create a key file whole or not at all."""
    draft = path.with_name(f"{path.name}.new")
    # A start that was killed may have left it.
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_NUM_KEY_BYTES))
        # Or a crash of the machine could leave the name without the key.
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync_folder(path.parent)
