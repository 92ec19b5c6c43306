"""Serves the lines of a batch that have no result yet."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from app.batches.lines import BadLine, Line, LineRequest, LineRules, parse_line, read_pieces
from app.batches.pacing import Pacer, Slot
from app.batches.records import Record, bad_line_record, record_id, response_record
from app.batches.work import WorkFile
from app.http.client import Client
from app.http.inner_call import InnerResponse
from app.storage.disk.in_thread import in_thread
from app.storage.disk.quota import NoRoomForFile

# Lines whose results are on their way to the disk; with more, no further ones are sent.
_MAX_UNWRITTEN: Final = 256
# Seconds in which results gather before they are written: a transaction is a thread's turn and a
# `fsync`, and a core that does either is one that computes less.
_GATHERING: Final = 0.1
# Bytes of lines that are read at a time.
_PIECE: Final = 1 << 16

# What an error has whose line can be served once another response has ended its turn in the conversation.
_LOCKED: Final = b'"code": "conversation_locked"'

# Takes the endpoint, the body, the client and the id of the request.
Dispatch = Callable[[str, bytes, Client, str], Awaitable[InnerResponse]]


class Journal:
    """Writes results to disk; results that arrive at nearly the same time share a transaction."""

    def __init__(self, work: WorkFile) -> None:
        self._work: Final = work
        self._lock: Final = asyncio.Lock()
        self._group: list[Record] = []

    async def put(self, record: Record) -> None:
        """Write a result; returns when it is on disk.

        Raises:
            NoRoomForFile: there is no room for it, or for another of its transaction.
            OSError: it cannot be written; the results of its transaction may be lost.
        """
        group = self._group
        group.append(record)
        async with self._lock:
            if self._group is group:
                try:
                    await asyncio.sleep(_GATHERING)
                finally:
                    # Also when the batch is cancelled: these lines have been served.
                    self._group = []
                    await in_thread(partial(self._work.put, group))


class LineProcessor:
    """Sends each line to its endpoint and records the response.

    If the response says that the server is overloaded or not available, or that another one is adding to the
    conversation, the line is sent again later.
    """

    def __init__(
        self,
        path: Path,
        batch_id: str,
        rules: LineRules,
        work: WorkFile,
        *,
        client: Client,
        pacer: Pacer,
        dispatch: Dispatch,
        on_record: Callable[[Record], None],
    ) -> None:
        """`on_record` is called when a result is on the disk."""
        self._batch_id: Final = batch_id
        self._client: Final = client
        self._pacer: Final = pacer
        self._dispatch: Final = dispatch
        self._on_record: Final = on_record
        self._journal: Final = Journal(work)
        self._requests: Final = unfinished(path, batch_id, rules, work)

    async def run(self) -> None:
        """Serve all lines; lines that are cancelled get no result.

        Raises:
            NoRoomForFile: there is no room for results; further lines are not served.
            OSError: the input cannot be read, or a result cannot be written.
        """
        unwritten, failure = asyncio.Semaphore(_MAX_UNWRITTEN), None
        try:
            async with asyncio.TaskGroup() as tasks:
                while (requests := await in_thread(self._next_requests)) is not None:
                    for request in requests:
                        await unwritten.acquire()
                        if isinstance(request, Record):
                            task = tasks.create_task(self._put(request))
                        else:
                            slot = await self._pacer.acquire(self._client.key_digest)
                            task = tasks.create_task(self._serve(request, slot))
                            # Also of a task that is cancelled before it begins.
                            task.add_done_callback(partial(_release, slot))
                        task.add_done_callback(lambda _: unwritten.release())
        except* (NoRoomForFile, OSError) as group:
            # Early versions of Python 3.11 wrap what is raised here in a group again.
            failure = group.exceptions[0]
        finally:
            self._requests.close()
        if failure is not None:
            raise failure

    def _next_requests(self) -> list[LineRequest | Record] | None:
        return next(self._requests, None)

    async def _serve(self, request: LineRequest, slot: Slot) -> None:
        request_id = record_id(self._batch_id, request.number)
        while True:
            response = await self._dispatch(request.url, request.body, self._client, request_id)
            if not _passes(response):
                break
            await self._pacer.back_off()
        slot.release()
        await self._put(response_record(self._batch_id, request, response))

    async def _put(self, record: Record) -> None:
        await self._journal.put(record)
        self._on_record(record)


def _passes(response: InnerResponse) -> bool:
    """Return whether a response is an error that goes by itself."""
    if response.status == HTTPStatus.BAD_REQUEST:
        return _LOCKED in response.body
    return response.status == HTTPStatus.SERVICE_UNAVAILABLE


def _release(slot: Slot, _: "asyncio.Task[None]") -> None:
    slot.release()


def unfinished(
    path: Path, batch_id: str, rules: LineRules, work: WorkFile
) -> Generator[list[LineRequest | Record]]:
    """Yield the lines that have no result, in pieces, of which some have none.

    Validation has recorded a result for invalid lines, except for lines that became invalid because a server
    with other settings continues the batch.

    Raises:
        NoRoomForFile: there is no room for the results of lines that have none.
    """

    def parsed(line: Line) -> LineRequest | Record:
        try:
            return parse_line(line, rules)
        except BadLine as error:
            return bad_line_record(batch_id, line.number, error)

    for piece in read_pieces(path, rules.max_line_bytes, _PIECE):
        left = [line for line in piece.lines if not work.has(line.number)]
        if left:
            work.check_room()
        yield [parsed(line) for line in left]
