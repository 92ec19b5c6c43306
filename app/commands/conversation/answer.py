"""An answer as it streams in."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from app.commands.server.server_address import Server
from app.commands.server.server_client import stream_chat
from app.commands.server.sse import Chunk


@dataclass
class Answer:
    """What has come of an answer so far."""

    model: str = ""
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None

    def add(self, chunk: Chunk) -> tuple[str, str]:
        """Take a chunk in; return the pieces that it adds to the reasoning and to the text."""
        self.model = chunk.get("model") or self.model
        self.usage = chunk.get("usage") or self.usage
        # The last chunk, with the usage, has no choices.
        choice = next(iter(chunk.get("choices") or [{}]))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or {}
        # Servers name it in one of two ways, or in both.
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        self.reasoning += reasoning
        self.text += text
        return reasoning, text


class Audience(Protocol):
    """What is shown of an answer while it comes."""

    def show_reasoning(self, text: str) -> None: ...

    def show_text(self, text: str) -> None: ...


def receive(
    server: Server,
    body: Mapping[str, object],
    answer: Answer,
    audience: Audience,
    show_waiting: Callable[[], None],
) -> None:
    """Request a completion and take it in; an interruption leaves what has come in `answer`.

    show_waiting: called now and then until the first piece, while the server is at work.

    Raises:
        CommandError: there is no server.
        RequestFailed: it refuses the request, or the answer breaks off.
    """
    request = {**body, "stream_options": {"include_usage": True}}
    with closing(stream_chat(server, request)) as chunks:
        for chunk in chunks:
            if chunk is not None:
                reasoning, text = answer.add(chunk)
                if reasoning:
                    audience.show_reasoning(reasoning)
                if text:
                    audience.show_text(text)
            elif not answer.text and not answer.reasoning:
                show_waiting()
