"""`/v1/chat/completions`: the request, the answer, and the chunks of a streamed answer."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from app.schemas import unsupported
from app.schemas.fields import Text
from app.schemas.request import GenerationRequest, WireRequest
from app.schemas.usage import Usage
from batching import FinishReason

_PART_SEPARATOR: Final = "\n"  # vLLM's and llama.cpp's too


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


def _joined_parts(content: Any) -> Any:
    """Return the text of a list of text parts."""
    if not isinstance(content, list):
        return content
    return _PART_SEPARATOR.join(_text_of(part) for part in content)


def _text_of(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            message = f"a part of type {kind[:40]!r} cannot be read: this model takes text only"
            raise PydanticCustomError("part_type", "{message}", {"message": message})
        case _:
            raise PydanticCustomError("part", "a part must have a type, and text if that is 'text'")


Content = Annotated[
    Text, BeforeValidator(_joined_parts, json_schema_input_type=str | list[TextPart])
]


class ChatMessage(WireRequest):
    """One turn of the conversation; what an assistant said before may be null, hence empty."""

    defaults = unsupported.MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_turn(cls, data: Any) -> Any:
        match data:
            case {"role": "tool" | "function"}:
                raise PydanticCustomError("unsupported", "tool calls are not supported yet")
            case {"role": "assistant", "content": None}:
                return data | {"content": ""}
            case _:
                return data

    def template_fields(self) -> dict[str, str]:
        """Return what a chat template gets; few know OpenAI's newer name of the system role."""
        role = "system" if self.role == "developer" else self.role
        optional = {"name": self.name, "reasoning_content": self.reasoning_content}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"role": role, "content": self.content} | given


class ChatCompletionRequest(GenerationRequest):
    defaults = unsupported.CHAT

    # One fault is told, so looking for more is work for nobody.
    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)

    @property
    def num_requested_tokens(self) -> int | None:
        """`max_tokens` is the older name; None asks for as many as fit the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class ChatAnswer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: ChatAnswer
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class ChatDelta(BaseModel):
    """What a chunk adds; only what is set is sent."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """Only what is set is sent: without `include_usage` there is no `usage`, not even null."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
