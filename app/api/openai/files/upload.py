"""Writes an upload to the disk while it comes."""

import logging
import os
import secrets
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import Request

from app.api.openai.files.schemas import PURPOSES
from app.api.serving import client_of
from app.http.errors.rejections import FilesTooLarge, Unavailable
from app.http.form import FILE, FormReader
from app.server_state import ServerState, server_state
from app.settings import env_name
from app.storage.disk.in_thread import in_thread
from app.storage.disk.quota import NoRoomForFile
from app.storage.files import Draft, FileTooLarge, StoredFile
from batching import InvalidRequest

logger = logging.getLogger(__name__)

# Bytes that are written at once.  An upload that stalls holds them in memory, and every connection may have one.
_CHUNK: Final = 1 << 16
# Bytes that a form may have beside its file.
_FRAME: Final = 1 << 20
_MAX_FILENAME: Final = 255
_TTL: Final = range(3600, 2_592_001)


async def receive_file(request: Request) -> StoredFile:
    """Store the file of a form; nothing of it stays unless all of it is there.

    Raises:
        InvalidRequest: the form is malformed, or asks for what there is not.
        FilesTooLarge: it is larger than a file may be, or than what the key has left.
        BodyTooSlow: it comes too slowly.
        Unavailable: the disk is full, or fails.
        ClientDisconnect: the client has gone.
    """
    state = server_state(request)
    try:
        return await _Upload(request, state).receive()
    except FileTooLarge:
        raise _file_too_large(state) from None
    except NoRoomForFile as error:
        raise FilesTooLarge(str(error)) from None
    except OSError as error:
        # Nothing of the client is in it, but paths of this machine may be.
        logger.error("an upload is not stored: %s", error)
        reason = os.strerror(error.errno) if error.errno else "the disk fails"
        raise Unavailable(f"files cannot be stored at present: {reason}") from None


def _file_too_large(state: ServerState) -> FilesTooLarge:
    limit = f"{state.settings.max_file_mib} MiB ({env_name('max_file_mib')})"
    return FilesTooLarge(f"the file is larger than the limit of {limit}")


@dataclass(frozen=True, slots=True)
class _Upload:
    request: Request
    state: ServerState

    async def receive(self) -> StoredFile:
        form = FormReader(self.request.headers.get("content-type", ""))
        if self._num_declared() > self.state.storage.batch.limits.max_file_bytes + _FRAME:
            raise FileTooLarge
        files = self.state.storage.batch.files
        await in_thread(files.delete_expired)
        draft = await in_thread(partial(files.begin, client_of(self.request).key_digest))
        try:
            await self._read(form, draft)
            stored = self._stored(form, draft)
            await in_thread(lambda: files.add(stored, draft))
        finally:
            await in_thread(lambda: files.discard(draft))
        return stored

    def _num_declared(self) -> int:
        length = self.request.headers.get("content-length", "")
        return int(length) if length.isdecimal() and len(length) < 20 else 0

    async def _read(self, form: FormReader, draft: Draft) -> None:
        """Read the whole body into the form and the draft."""
        pending = bytearray()
        async for chunk in self.request.stream():
            pending += form.feed(chunk)
            if len(pending) >= _CHUNK:
                data, pending = pending, bytearray()
                await in_thread(partial(draft.write, data))
        await in_thread(partial(draft.write, pending))
        if not form.is_complete:
            raise InvalidRequest(FILE, "the form is not complete")

    def _stored(self, form: FormReader, draft: Draft) -> StoredFile:
        """Check the fields of the form; return what is known of its file."""
        if form.filename is None:
            raise InvalidRequest(FILE, "the form has no file")
        if (purpose := form.fields.get("purpose")) not in PURPOSES:
            known = ", ".join(map(repr, PURPOSES))
            raise InvalidRequest("purpose", f"files are for batches and prompts here: {known}")
        created = int(self.state.storage.batch.clock())
        ttl = _ttl(form.fields)
        return StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            owner=client_of(self.request).key_digest,
            purpose=purpose,
            filename=form.filename[:_MAX_FILENAME] or FILE,
            num_bytes=draft.num_bytes,
            created=created,
            expires=None if ttl is None else created + ttl,
        )


def _ttl(fields: dict[str, str]) -> int | None:
    """Return for how many seconds the file is kept; None is until it is deleted."""
    if (text := fields.get("expires_after[seconds]")) is None:
        return None
    if fields.get("expires_after[anchor]") != "created_at":
        raise InvalidRequest("expires_after", "its anchor must be 'created_at'")
    if not text.isdecimal() or len(text) > 9 or int(text) not in _TTL:
        message = f"its seconds must be an integer from {_TTL.start} to {_TTL.stop - 1}"
        raise InvalidRequest("expires_after", message)
    return int(text)
