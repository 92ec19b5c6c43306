"""`POST /v1/chat/completions`."""

from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import APIRouter, Request, Response

from app.endpoints.serving import engine_for, respond
from app.generation import generate
from app.prompt import chat_prompt
from app.reply import head, new_id
from app.schemas.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
)
from app.schemas.usage import Usage
from batching import FinishReason

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation; with `stream: true` as server-sent events."""
    engine = await engine_for(request, body.model)
    prompt = await anyio.to_thread.run_sync(chat_prompt, engine.model, body.messages)
    completion_id = new_id("chatcmpl")
    generation = await generate(
        engine, prompt, body, completion_id=completion_id, max_tokens=body.num_requested_tokens
    )
    reply = ChatReply(head(completion_id, engine.model.model_id), body.include_usage)
    return await respond(request, generation, reply, stream=body.stream)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Chunks begin with the role and end with the finish reason, neither with any text."""

    head: dict[str, Any]
    include_usage: bool

    def opening(self) -> list[ChatChunk]:
        return [self._chunk(ChatDelta(role="assistant", content=""))]

    def piece(self, text: str) -> ChatChunk:
        return self._chunk(ChatDelta(content=text))

    def closing(self, finish_reason: FinishReason, usage: Usage) -> list[ChatChunk]:
        chunks = [self._chunk(ChatDelta(), finish_reason)]
        if self.include_usage:
            chunks.append(
                ChatChunk(object="chat.completion.chunk", choices=[], usage=usage, **self.head)
            )
        return chunks

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> ChatCompletion:
        choice = ChatChoice(message=ChatAnswer(content=text), finish_reason=finish_reason)
        return ChatCompletion(choices=[choice], usage=usage, **self.head)

    def _chunk(self, delta: ChatDelta, finish_reason: FinishReason | None = None) -> ChatChunk:
        choice = ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)
        no_usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self.head, **no_usage)
