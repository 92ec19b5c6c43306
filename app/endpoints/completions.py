"""`POST /v1/completions`."""

from dataclasses import dataclass
from typing import Any, Final

import anyio
from fastapi import APIRouter, Request, Response

from app.endpoints.serving import engine_for, respond
from app.generation import generate
from app.prompt import completion_prompt
from app.reply import head, new_id
from app.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionRequest,
)
from app.schemas.usage import Usage
from batching import FinishReason

# OpenAI's default; it gives way to the context, since nobody asked for it.
_DEFAULT_MAX_TOKENS: Final = 16

router = APIRouter()


@router.post("/v1/completions", response_model=Completion)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a text; with `stream: true` as server-sent events."""
    engine = await engine_for(request, body.model)
    prompt = await anyio.to_thread.run_sync(completion_prompt, engine.model, body.prompt)
    room = engine.model.max_model_len - len(prompt)
    completion_id = new_id("cmpl")
    generation = await generate(
        engine,
        prompt,
        body,
        completion_id=completion_id,
        max_tokens=body.max_tokens or min(_DEFAULT_MAX_TOKENS, max(room, 1)),
    )
    reply = CompletionReply(head(completion_id, engine.model.model_id), body.include_usage)
    return await respond(request, generation, reply, stream=body.stream)


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """Chunks of text; the last one has none, but the finish reason."""

    head: dict[str, Any]
    include_usage: bool

    def opening(self) -> list[CompletionChunk]:
        return []

    def piece(self, text: str) -> CompletionChunk:
        return self._chunk(text)

    def closing(self, finish_reason: FinishReason, usage: Usage) -> list[CompletionChunk]:
        chunks = [self._chunk("", finish_reason)]
        if self.include_usage:
            chunks.append(
                CompletionChunk(object="text_completion", choices=[], usage=usage, **self.head)
            )
        return chunks

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> Completion:
        choice = CompletionChoice(text=text, finish_reason=finish_reason)
        return Completion(choices=[choice], usage=usage, **self.head)

    def _chunk(self, text: str, finish_reason: FinishReason | None = None) -> CompletionChunk:
        choice = CompletionChunkChoice(
            index=0, text=text, logprobs=None, finish_reason=finish_reason
        )
        no_usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        return CompletionChunk(object="text_completion", choices=[choice], **self.head, **no_usage)
