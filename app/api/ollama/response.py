"""The responses of `/api/chat` and `/api/generate`, of which a stream has one on each line."""

from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import BaseModel

from app.api.openai.schemas.logprobs import TokenLogprobs
from app.api.schemas.errors import error_responses
from app.api.sse import LINES_TYPE

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaError(BaseModel):
    error: str


ERROR_RESPONSES: Final = error_responses(OllamaError)
LINE_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The response; unless `stream` is false, lines of JSON.",
        "content": {LINES_TYPE: {"itemSchema": {"type": "object"}}},
    }
}


class CalledFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class Call(BaseModel):
    id: str
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[Call] | None = None


class Answer(BaseModel):
    """Only the last line of a stream has durations, in nanoseconds, and counts of tokens."""

    model: str
    created_at: datetime
    done: bool
    done_reason: DoneReason | None = None
    logprobs: TokenLogprobs | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatAnswer(Answer):
    message: AnswerMessage


class GenerateAnswer(Answer):
    response: str
    thinking: str | None = None


def now() -> datetime:
    return datetime.now(UTC)
