"""Requests and their outcomes: whole responses and streams in the same terms."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from scripts.server_process import Address
from scripts.soak.wire import Broken, Exchange, Head, request_bytes
from scripts.sse import BadChunk, Chunk, SSEReader

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Outcome:
    """The outcome of one request; times are those of `monotonic`.

    status: None if no head came.
    taken: when the head came; a stream's comes when the engine has admitted the request.
    first_token: when the first text came.
    error: the server's error, in the body or in the stream.
    broken: what is wrong with the connection.
    """

    sent: float
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    taken: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    body: Any = None
    text: str = ""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    num_output_tokens: int = 0
    error: Mapping[str, Any] | None = None
    broken: str | None = None
    is_done: bool = False

    @property
    def is_complete(self) -> bool:
        """True if all of a response came, without an error."""
        return (
            self.status == 200
            and self.broken is None
            and self.error is None
            and self.is_done
            and bool(self.finish_reasons)
        )

    def __str__(self) -> str:
        ending = self.broken or self.error or sorted(set(self.finish_reasons.values()))
        return f"{self.status} {ending}"


def _ignore(outcome: Outcome) -> None:
    pass


async def get(address: Address, path: str) -> Outcome:
    return await _exchange(address, request_bytes(path), _ignore)


async def ask(
    address: Address,
    path: str,
    body: Mapping[str, Any],
    *,
    on_head: Callable[[Outcome], None] = _ignore,
) -> Outcome:
    """Send a request and read the response to its end; the outcome has whatever goes wrong."""
    return await _exchange(address, request_bytes(path, body), on_head)


async def ask_all(
    address: Address, path: str, bodies: Sequence[Mapping[str, Any]]
) -> list[Outcome]:
    """Send requests all at once."""
    return await asyncio.gather(*(ask(address, path, body) for body in bodies))


async def _exchange(
    address: Address, request: bytes, on_head: Callable[[Outcome], None]
) -> Outcome:
    outcome = Outcome(sent=monotonic())
    try:
        async with await Exchange.open(address) as exchange:
            await exchange.send(request)
            await _read(exchange, outcome, on_head)
    except OSError as error:
        outcome.broken = f"{type(error).__name__}: {error.strerror}"
    except (Broken, BadChunk) as error:
        outcome.broken = str(error)
    outcome.ended = monotonic()
    return outcome


async def _read(exchange: Exchange, outcome: Outcome, on_head: Callable[[Outcome], None]) -> None:
    head = await exchange.head()
    outcome.status, outcome.headers, outcome.taken = *head, monotonic()
    on_head(outcome)
    if "text/event-stream" in head.headers.get("content-type", ""):
        await _read_events(exchange, head, outcome)
        return
    content = b"".join([piece async for piece in exchange.pieces(head)])
    outcome.body = content
    if "json" in head.headers.get("content-type", ""):
        outcome.body = json.loads(content)
        if isinstance(outcome.body, dict):
            _take(outcome, outcome.body)
        outcome.is_done = True


async def _read_events(exchange: Exchange, head: Head, outcome: Outcome) -> None:
    reader = SSEReader()
    async for piece in exchange.pieces(head):
        for chunk in reader.feed(piece):
            _take(outcome, chunk)
    outcome.is_done = reader.is_done


def _take(outcome: Outcome, body: Chunk) -> None:
    """Read a chunk of a stream, or a whole response or error."""
    outcome.error = body.get("error") or outcome.error
    outcome.num_output_tokens = (body.get("usage") or {}).get(
        "completion_tokens", outcome.num_output_tokens
    )
    for choice in body.get("choices") or ():
        if (reason := choice.get("finish_reason")) is not None:
            outcome.finish_reasons[choice["index"]] = reason
        message = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        if text and outcome.first_token is None:
            outcome.first_token = monotonic()
        if choice["index"] == 0:
            outcome.text += text
