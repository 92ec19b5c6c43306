"""One client of an OpenAI-compatible server: streamed chat completions, and when they arrived."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Final, Self

import httpx

from scripts.sse import BadChunk, Chunk, SSEReader

Messages = Sequence[dict[str, str]]

_MAX_ERROR: Final = 300
# Seconds.  Servers close idle connections, uvicorn after 5: by then they are no longer used.
_KEEPALIVE: Final = 2.0
# Where servers put text: vLLM's and llama.cpp's, then mlx-lm's and vLLM's newer reasoning.
_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning")


@dataclass(slots=True)
class RequestRecord:
    """What a client saw of one request; times are a clock's seconds.

    `chunk_times` has a time for each chunk with text.  The first of them is the first token: a
    server may send a chunk earlier that only names the role.
    """

    sent: float
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int | None:
        return self.usage.get("prompt_tokens")

    @property
    def num_cached_tokens(self) -> int | None:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def num_output_tokens(self) -> int:
        """The server's count; of a server without usage, the number of chunks."""
        return int(self.usage.get("completion_tokens", len(self.chunk_times)))

    @property
    def ttft(self) -> float | None:
        """The time to the first token."""
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def e2e(self) -> float:
        """The time to the end of the completion."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """The time per output token after the first; a single token has none."""
        if self.ttft is None or self.num_output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """The times between one chunk and the next."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    def add(self, chunk: Chunk, now: float) -> None:
        """Take a chunk of the stream.

        Raises:
            StreamFault: it is an error, or no chunk of a chat completion.
        """
        if chunk.get("error"):
            raise StreamFault(_message_in(json.dumps(chunk)))
        try:
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                if any(delta.get(name) for name in _TEXT_FIELDS):
                    self.chunk_times.append(now)
                self.text += delta.get("content") or ""
        except (AttributeError, TypeError):
            raise StreamFault(f"not a chunk: {json.dumps(chunk)[:_MAX_ERROR]}") from None
        self.ended = now


class StreamFault(Exception):
    """The server rejected the request or broke its stream; the text is for the report."""


class ChatClient:
    """Sends chat completions to one server; any number may be in flight at once.

    `ask` raises nothing that a server can cause: that is the record's `error`.
    `options` are further fields of each request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        timeout: float,
        options: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._model = model
        self._options = options or {}
        self._timeout = timeout
        self._clock = clock
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=None,  # one time-out for the whole request instead
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE),
            trust_env=False,  # a proxy would be measured too
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, messages: Messages, max_tokens: int) -> RequestRecord:
        """Send a conversation and read the completion to its end."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        record = RequestRecord(self._clock())
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(body, record)
        except TimeoutError:
            record.error = f"not complete within {self._timeout:g} s"
        except httpx.HTTPError as error:
            # Some have no text; a connection that the server reset is a bare ReadError.
            record.error = ": ".join(filter(None, [type(error).__name__, str(error)]))
        except (StreamFault, BadChunk) as error:
            record.error = str(error)
        if record.error is not None:
            record.ended = self._clock()
        return record

    async def _stream(self, body: dict[str, Any], record: RequestRecord) -> None:
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise StreamFault(f"HTTP {response.status_code}: {_message_in(text)}")
            reader = SSEReader()
            async for piece in response.aiter_bytes():
                now = self._clock()
                for chunk in reader.feed(piece):
                    record.add(chunk, now)
        if not reader.is_done:
            raise StreamFault("the stream ended without [DONE]")
        if not record.chunk_times:
            raise StreamFault("the completion has no text")


def _message_in(text: str) -> str:
    """Return the message of an error body, in any of the shapes that servers send."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    match body:
        case {"error": {"message": message}} | {"error": message} | {"detail": message}:
            pass
        case _:
            message = body
    return " ".join(str(message).split())[:_MAX_ERROR] or "no message"
