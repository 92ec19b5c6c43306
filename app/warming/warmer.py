"""Reads the prompts of a file into the prefix cache when the server has started."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any, Final

from app.batches.lines import BadLine, Line, Piece, read_pieces
from app.batches.pacing import Pacer
from app.batches.processing import Dispatch
from app.http.client import Client
from app.http.inner_call import InnerResponse
from app.observability.logs import logfmt, summarize_exception
from app.storage.disk.in_thread import in_thread
from app.warming.lines import URL, warming_body

logger = logging.getLogger(__name__)

# Bytes of lines that are read at a time.
_PIECE: Final = 1 << 16
_MAX_SHOWN: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmingServices:
    """What sends lines to a server.

    clients: each has a prefix cache of its own, and sends every line.
    has_room: returns whether more blocks of a model can be pinned, by its name; None is the default model.
    """

    clients: Sequence[Client]
    pacer: Pacer
    dispatch: Dispatch
    has_room: Callable[[str | None], bool]
    max_line_bytes: int
    clock: Callable[[], float] = monotonic


class Warmer:
    """Sends the lines of a file, one after the other, as lines of a batch are sent.

    A line that fails is one warning, and the next one goes on.  Those of a model in which no more can be pinned are
    not sent.  It lives on the event loop.

    name: what names the file in warnings.
    """

    def __init__(self, path: Path, name: str, services: WarmingServices) -> None:
        self._path: Final = path
        self._name: Final = name
        self._services: Final = services
        self._task: asyncio.Task[None] | None = None
        self._counts = Counter[str]()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End it, also within a line; it does not wait."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End it, and wait for that."""
        self.stop()
        await self.ended()

    async def ended(self) -> None:
        """Wait for its end."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        started, status = self._services.clock(), "completed"
        self._log("in_progress")
        try:
            await self._send_all()
        except asyncio.CancelledError:
            status = "cancelled"
        except Exception as error:
            status = "failed"
            logger.error("%s: %s", self._name, summarize_exception(error))
        counts = {
            name: self._counts[name]
            for name in ("warmed", "failed", "no_room", "prompt_tokens", "cached_tokens")
        }
        self._log(status, **counts, seconds=round(self._services.clock() - started, 3))

    async def _send_all(self) -> None:
        pieces = read_pieces(self._path, self._services.max_line_bytes, _PIECE)
        while (piece := await in_thread(partial(_next, pieces))) is not None:
            for line in piece.lines:
                try:
                    self._counts[await self._send(line)] += 1
                except BadLine as error:
                    self._counts["failed"] += 1
                    message = " ".join(str(error).split())[:_MAX_SHOWN]
                    logger.warning("%s, line %d: %s", self._name, line.number, message)

    async def _send(self, line: Line) -> str:
        """Send a line for each client; return what to count.

        Raises:
            BadLine: it is no request, or was refused.
        """
        services = self._services
        fields = await in_thread(lambda: warming_body(line, services.max_line_bytes))
        model = fields.get("model")
        body = json.dumps(fields).encode()
        for client in services.clients:
            if not services.has_room(model if isinstance(model, str) else None):
                return "no_room"
            response = await self._respond(client, body, f"warm_{line.number}")
            if response.status != HTTPStatus.OK:
                raise BadLine("refused", _message(response))
            usage = json.loads(response.body)["usage"]
            self._counts["prompt_tokens"] += usage["prompt_tokens"]
            self._counts["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        return "warmed"

    async def _respond(self, client: Client, body: bytes, request_id: str) -> InnerResponse:
        """Send a body when there is nothing else to do, and again as long as the server is not available."""
        services = self._services
        slot = await services.pacer.acquire(client.key_digest)
        try:
            while True:
                response = await services.dispatch(URL, body, client, request_id)
                if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    return response
                await services.pacer.back_off()
        finally:
            slot.release()

    def _log(self, status: str, **numbers: float) -> None:
        fields: dict[str, Any] = {"warming": status, **numbers}
        logger.info("%s", logfmt(fields), extra={"fields": fields})


def _next(pieces: Iterator[Piece]) -> Piece | None:
    return next(pieces, None)


def _message(response: InnerResponse) -> str:
    """Return the message of an error, in OpenAI's form."""
    return str(json.loads(response.body)["error"]["message"])
