"""`/v1/chat/completions`: the request."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator

from app.api.openai.schemas import unsupported
from app.api.openai.schemas.reasoning import ReasoningEffort, TemplateKwargs
from app.api.openai.schemas.sampling import GenerationRequest
from app.api.openai.schemas.structured_outputs import ResponseFormat
from app.api.openai.schemas.tools import ToolCall, ToolChoice, ToolList, check_tool_choice
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Text, check_length, fault

_PART_SEPARATOR: Final = "\n"  # vLLM's and llama.cpp's too
_MIN_ANSWER: Final = 256
# Reading one takes some five microseconds, in which nobody else is served.
_MAX_MESSAGES: Final = 8192
_MAX_TOOL_CALLS: Final = 8192  # of all turns


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
            raise fault(message)
        case _:
            raise fault("a part must have a type, and text if that is 'text'")


Content = Annotated[
    Text, BeforeValidator(_joined_parts, json_schema_input_type=str | list[TextPart])
]


class ChatMessage(RequestModel):
    """One turn of the conversation; what an assistant said before may be null, hence empty."""

    defaults = unsupported.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: Text | None = None
    reasoning_content: Text | None = Field(default=None, description="Or `reasoning`.")
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_turn(cls, data: Any) -> Any:
        match data:
            case {"role": "function"}:
                raise fault("this role is called 'tool' now")
            case {"role": "assistant"}:
                return _with_one_spelling(data)
            case _:
                return data

    @model_validator(mode="after")
    def _check_tool_fields(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise fault("only an assistant calls tools", "tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise fault("a tool's result needs the id of its call", "tool_call_id")
        return self

    def template_fields(self) -> dict[str, Any]:
        """Return what a chat template gets; few know OpenAI's newer name of the system role."""
        role = "system" if self.role == "developer" else self.role
        optional = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": role, "content": self.content} | _not_none(optional)


def _with_one_spelling(turn: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's turn with what clients write in several ways written in one."""
    given = {"reasoning_content": turn.get("reasoning")} | _not_none(turn)
    if "content" in turn or given.get("tool_calls"):
        given.setdefault("content", "")
    return given


def _not_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _checked_lengths(messages: Any) -> Any:
    """Refuse too many turns or tool calls, before any is looked at."""
    if not isinstance(messages, list):
        return messages
    check_length(messages, _MAX_MESSAGES)
    calls = [turn.get("tool_calls") for turn in messages if isinstance(turn, dict)]
    if sum(len(given) for given in calls if isinstance(given, list)) > _MAX_TOOL_CALLS:
        message = f"its turns have more than {_MAX_TOOL_CALLS} tool calls"
        raise fault(message)
    return messages


# One fault is told, so looking for more is work for nobody.
Messages = Annotated[
    list[ChatMessage],
    FailFast(),
    Field(min_length=1),
    BeforeValidator(
        _checked_lengths,
        json_schema_input_type=Annotated[
            list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES)
        ],
    ),
]


class ChatCompletionRequest(GenerationRequest):
    defaults = unsupported.CHAT

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: ToolList = Field(default_factory=list)
    tool_choice: ToolChoice | None = Field(
        default=None, description="`auto` with tools, else `none`."
    )
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_chat_fields(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise fault("this needs logprobs: true", "top_logprobs")
        begins_anew = (
            self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        )
        if self.continue_final_message and begins_anew:
            raise fault(
                "it cannot be combined with add_generation_prompt", "continue_final_message"
            )
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        if self.tool_choice is not None:
            check_tool_choice(self.tools, self.tool_choice)
        return self

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        asked = [
            self.response_format is not None and self.response_format.grammar() is not None,
            self.structured_outputs is not None,
            self.used_tool_choice not in ("none", "auto"),
        ]
        if sum(asked) > 1:
            raise fault(
                "only one of response_format, structured_outputs and a tool_choice that calls "
                "a tool can say what the answer looks like",
                "structured_outputs" if asked[1] else "response_format",
            )
        return self

    @property
    def used_tool_choice(self) -> ToolChoice:
        if self.tool_choice is not None:
            return self.tool_choice
        return "auto" if self.tools else "none"

    @property
    def num_requested_tokens(self) -> int | None:
        """`max_tokens` is the older name; None asks for as many as fit the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_reserved_tokens(self) -> int:
        """Nobody said how long the answer may be, so a cut prompt leaves it some room."""
        return self.num_requested_tokens or max(_MIN_ANSWER, self.min_tokens)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
