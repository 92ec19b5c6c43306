"""One client of an OpenAI-compatible server: streamed chat completions, and when they arrived."""

import asyncio
import json
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Self

import httpx

from scripts.bench.records import RequestRecord

Messages = Sequence[dict[str, str]]

_MAX_ERROR: Final = 300
# Seconds.  Servers close idle connections, uvicorn after 5: by then we no longer use them.
_KEEPALIVE: Final = 2.0
# Where servers put text: vLLM's and llama.cpp's, then mlx-lm's and vLLM's newer reasoning.
_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning")


class StreamFault(Exception):
    """The server refused the request or broke its stream; the text is for the report."""


class ChatClient:
    """Asks one server; any number of requests may be under way at once.

    `ask` raises nothing that a server can cause: trouble is the record's `error`.
    """

    def __init__(
        self, url: str, model: str, timeout: float, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._model = model
        self._timeout = timeout
        self._clock = clock
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=None,  # one time-out for the whole request instead
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE),
            trust_env=False,  # a proxy would be measured too
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def ask(
        self, messages: Messages, max_tokens: int, priority: str | None = None
    ) -> RequestRecord:
        """Send a conversation and read the answer to its end."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if priority is not None:
            body["priority"] = priority
        answer = Answer(self._clock)
        error = None
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(body, answer)
            answer.check_whole()
        except TimeoutError:
            error = f"no end of the answer within {self._timeout:g} s"
        except httpx.HTTPError as fault:
            # Some have no text; a connection that the server reset is a bare ReadError.
            error = ": ".join(filter(None, [type(fault).__name__, str(fault)]))
        except StreamFault as fault:
            error = str(fault)
        return answer.record(error, priority)

    async def _read(self, body: dict[str, Any], answer: "Answer") -> None:
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            answer.status = response.status_code
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise StreamFault(f"HTTP {response.status_code}: {_message_in(text)}")
            async for line in response.aiter_lines():
                answer.take(line)


class Answer:
    """A stream as it comes, line by line."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent = clock()
        self._ended = self._sent
        self._chunk_times: list[float] = []
        self._pieces: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._is_done = False
        self.status: int | None = None

    def take(self, line: str) -> None:
        """Read a line; comments, which keep a connection alive, say nothing.

        Raises:
            StreamFault: the server says that it failed, or what is no JSON.
        """
        now = self._clock()
        field, _, value = line.partition(":")
        value = value.strip()
        if field == "error":  # llama.cpp's, without an event around it
            raise StreamFault(_message_in(value))
        if field != "data":
            return
        if value == "[DONE]":
            self._is_done = True
            return
        try:
            chunk = json.loads(value)
        except ValueError:
            raise StreamFault(f"a chunk is no JSON: {value[:_MAX_ERROR]}") from None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise StreamFault(_message_in(value))
        try:
            self._take_chunk(chunk, now)
        except (AttributeError, TypeError):
            raise StreamFault(f"a chunk has another shape: {value[:_MAX_ERROR]}") from None

    def check_whole(self) -> None:
        """Raise StreamFault unless the stream came to its end and said something."""
        if not self._is_done:
            raise StreamFault("the stream ended without [DONE]")
        if not self._chunk_times:
            raise StreamFault("the answer has no text")

    def record(self, error: str | None, priority: str | None) -> RequestRecord:
        """Return what came; a server that tells no usage has its chunks counted as tokens."""
        details = self._usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            sent=self._sent,
            ended=self._ended if error is None else self._clock(),
            chunk_times=tuple(self._chunk_times),
            text="".join(self._pieces),
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_cached_tokens=details.get("cached_tokens"),
            num_output_tokens=self._usage.get("completion_tokens", len(self._chunk_times)),
            finish_reason=self._finish_reason,
            priority=priority,
            status=self.status,
            error=error,
        )

    def _take_chunk(self, chunk: dict[str, Any], now: float) -> None:
        self._ended = now
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(field) for field in _TEXT_FIELDS):
                self._chunk_times.append(now)
            self._pieces.append(delta.get("content") or "")
            self._finish_reason = choice.get("finish_reason") or self._finish_reason


def _message_in(text: str) -> str:
    """Return the message of an error body, in any of the shapes that servers send."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    match body:
        case {"error": {"message": message}} | {"error": message} | {"detail": message}:
            pass
        case {"message": message}:
            pass
        case _:
            message = body
    return " ".join(str(message).split())[:_MAX_ERROR] or "no message"
