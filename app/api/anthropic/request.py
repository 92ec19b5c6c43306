"""`/v1/messages` and `/v1/messages/count_tokens`: the requests."""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from app.api.anthropic.blocks import Content, SystemContent, ToolResultParam
from app.api.anthropic.cache_control import CacheControl, num_controls
from app.api.anthropic.tools import ToolChoice, ToolList, tool_specs
from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import (
    INT32_MAX,
    MAX_MESSAGES,
    JsonSchema,
    StopStrings,
    Text,
    check_length,
    field_error,
)
from app.generation.params import GenerationParams
from app.parsing import tool_spec
from app.parsing.output_format import GrammarSpec
from app.parsing.tool_spec import ToolSpec
from batching import RetainedPrefix, Retention, json_schema_grammar

# The limit is for all turns together: validating a block takes some six microseconds of the event loop.
_MAX_BLOCKS: Final = 16_384
# Anthropic's API rejects a request without a number, llama.cpp takes this one.
_DEFAULT_MAX_TOKENS: Final = 4096

# As in Anthropic's API.
_MAX_BREAKPOINTS: Final = 4

# Fields that are refused, each with the values that ask for nothing.
_UNSUPPORTED: Final[Defaults] = {
    "container": (),
    "mcp_servers": ([],),
    # A model without fallbacks runs alone.
    "fallbacks": ([], "default"),
    "output_format": (),  # the name of `output_config.format` in a beta
    "thread": (),
}

# The blocks that a turn of each role may consist of.
_KINDS: Final = {
    "system": {"text"},
    "user": {"text", "image", "document", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
}


class TurnParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        for block in self.content:
            if block.type not in _KINDS[self.role]:
                message = f"a turn of the role {self.role} has no blocks of type {block.type}"
                raise field_error(message, "content")
        return self


def _checked_lengths(messages: Any) -> Any:
    """Reject too many turns or blocks before each is looked at."""
    if not isinstance(messages, list):
        return messages
    check_length(messages, MAX_MESSAGES)
    blocks = _contents(messages)
    if len(blocks) + len(_contents(blocks)) > _MAX_BLOCKS:
        raise field_error(f"its turns have more than {_MAX_BLOCKS} blocks")
    return messages


def _contents(parents: list[Any]) -> list[Any]:
    """Return the blocks of all turns, or those of all results among blocks."""
    contents = [parent.get("content") for parent in parents if isinstance(parent, dict)]
    return [block for content in contents if isinstance(content, list) for block in content]


_Messages = Annotated[list[TurnParam], FailFast(), Field(min_length=1)]
Messages = Annotated[
    _Messages,
    BeforeValidator(
        _checked_lengths,
        json_schema_input_type=Annotated[
            list[TurnParam], Field(min_length=1, max_length=MAX_MESSAGES)
        ],
    ),
]


class Thinking(RequestModel):
    """With `display: omitted` only the signature is returned, else all of it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(
        default=None,
        ge=0,
        le=INT32_MAX,
        description="After so many tokens of thinking its end is forced; also fewer than Anthropic's 1024.",
    )
    display: Literal["summarized", "updates", "omitted"] = "summarized"

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.type == "disabled" and self.budget_tokens is not None:
            raise field_error("it cannot be combined with type: disabled", "budget_tokens")
        return self


class JsonFormat(RequestModel):
    """The text follows the schema."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(RequestModel):
    """What is cached for one user is bounded."""

    user_id: Text | None = Field(default=None, max_length=1024)


class PromptRequest(RequestModel):
    """The fields that determine the prompt, and those that constrain the completion."""

    defaults = _UNSUPPORTED

    model: Text | None = Field(default=None, description="The default model if left out.")
    messages: Messages
    system: SystemContent = Field(default_factory=list)
    tools: ToolList = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    cache_control: CacheControl | None = Field(
        default=None, description="As of the last block of the prompt."
    )
    metadata: Metadata = Field(default_factory=Metadata)

    @model_validator(mode="after")
    def _check_breakpoints(self) -> Self:
        blocks = [*self.system, *(block for turn in self.messages for block in turn.content)]
        nested = [each for b in blocks if isinstance(b, ToolResultParam) for each in b.content]
        number = num_controls([*self.tools, *blocks, *nested]) + (self.cache_control is not None)
        if number > _MAX_BREAKPOINTS:
            message = f"{number} blocks have it; {_MAX_BREAKPOINTS} are the most"
            raise field_error(message, "cache_control")
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        if self.tool_choice is not None:
            self.tool_choice.check(self.tools)
        return self

    @property
    def tool_specs(self) -> list[ToolSpec]:
        """The tools that the model may call."""
        return tool_specs(self.tools)

    @property
    def effective_tool_choice(self) -> tool_spec.ToolChoice:
        if self.tool_choice is not None:
            return self.tool_choice.to_choice()
        return "auto" if self.tool_specs else "none"

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def content_grammar(self) -> GrammarSpec | None:
        if (wanted := self.output_config.format) is None:
            return None
        return GrammarSpec(json_schema_grammar(wanted.schema_), "output_config.format")


class CountTokensRequest(PromptRequest):
    """The tokens of its prompt are counted; `compaction` has no effect on them."""


class MessagesRequest(PromptRequest):
    """A larger `max_tokens` than the context has room for is reduced to that."""

    defaults: ClassVar[Defaults] = {**_UNSUPPORTED, "compaction": ()}

    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=INT32_MAX,
        description=f"{_DEFAULT_MAX_TOKENS} if left out; 0 only reads the prompt into the cache.",
    )
    # Without a value these three have the default of the model's generation_config.json.
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=INT32_MAX)
    stop_sequences: StopStrings = Field(default_factory=list)
    stream: bool = False
    service_tier: Literal["auto", "standard_only"] = "auto"

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        # 0 generates nothing.
        if budget is not None and self.max_tokens and budget >= self.max_tokens:
            raise field_error("max_tokens must be greater than this", "thinking.budget_tokens")
        return self

    def to_generation_params(self, retained: tuple[RetainedPrefix, ...]) -> GenerationParams:
        """Return the parameters; `retained` are the beginnings of the prompt that are to be cached."""
        return GenerationParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            clamp_max_tokens=True,
            stop=self.stop_sequences,
            retention=Retention(self.metadata.user_id or "", retained),
        )
