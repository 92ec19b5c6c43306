"""`/v1/responses`: the request."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from app.api.openai.responses.items.input_items import InputItems, all_tools
from app.api.openai.responses.items.tools import ToolChoice, ToolList, check_tools
from app.api.openai.responses.stored.references import Before
from app.api.openai.schemas.prompt_cache import PromptCacheFields, ResponseCacheOptions
from app.api.openai.schemas.queue_options import SERVICE_TIERS
from app.api.openai.schemas.reasoning import ReasoningEffort, TemplateKwargs, ThinkingTokens
from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import (
    INT32_MAX,
    CacheSalt,
    Id,
    JsonSchema,
    Metadata,
    Seed,
    StopStringList,
    Text,
    Timeout,
    field_error,
)
from app.generation.params import GenerationParams
from app.parsing.output_format import GrammarSpec
from app.prompts.render import DEFAULT_RESERVED, Truncation
from batching import Priority, json_object_grammar, json_schema_grammar

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"

# Fields of other APIs that would change the output.
_UNSUPPORTED: Final[Defaults] = {
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "n": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "messages": (),
    "response_format": (),
}

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ConversationReference(RequestModel):
    id: Id


def _conversation_id(value: Any) -> Any:
    return ConversationReference.model_validate(value).id if isinstance(value, dict) else value


_ConversationId = Annotated[
    Annotated[Id, Field(pattern=r"^conv_")],
    BeforeValidator(_conversation_id, json_schema_input_type=str | ConversationReference),
]


class TextFormat(RequestModel):
    """`strict: false` is enforced all the same."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    schema_: JsonSchema | None = Field(alias="schema", default=None)
    strict: bool = False

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.type == "json_schema":
            for field, value in (("name", self.name), ("schema", self.schema_)):
                if value is None:
                    raise field_error("the type json_schema needs it", field)
        elif self.schema_ is not None:
            raise field_error("this needs the type json_schema", "schema")
        return self

    def grammar(self) -> GrammarSpec | None:
        """Return the grammar of the content; None if any text is allowed."""
        if self.schema_ is not None:
            return GrammarSpec(json_schema_grammar(self.schema_), "text.format")
        if self.type == "json_object":
            return GrammarSpec(json_object_grammar(), "text.format")
        return None

    def echo(self) -> dict[str, Any]:
        if self.schema_ is None:
            return {"type": self.type}
        return self.model_dump(by_alias=True)


class TextConfig(RequestModel):
    """`verbosity` is a wish that models here do not know."""

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] = "medium"


class ReasoningConfig(RequestModel):
    """With `summary` the reasoning is the summary: as it is, since nothing summarizes it here.

    `max_tokens` is OpenRouter's.
    """

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingTokens | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def budget(self) -> int | None:
        return None if self.max_tokens == -1 else self.max_tokens

    @property
    def is_summarized(self) -> bool:
        return (self.summary or self.generate_summary) not in (None, "none")

    def echo(self) -> dict[str, Any]:
        summary = (self.summary or self.generate_summary) if self.is_summarized else None
        return {"effort": self.effort, "summary": summary}


class StreamOptions(RequestModel):
    """`include_obfuscation` adds nothing to the text, and is never on."""

    include_obfuscation: bool = False


class ResponseRequest(PromptCacheFields):
    """Fields are OpenAI's, and some of vLLM's."""

    defaults = _UNSUPPORTED

    model: Text | None = Field(default=None, description="The default model if left out.")
    input: InputItems = Field(default_factory=list)
    instructions: Text | None = None
    previous_response_id: Id | None = None
    conversation: _ConversationId | None = Field(
        default=None,
        description="The items of the response join it; no other response may meanwhile.",
    )
    tools: ToolList = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = Field(
        default=None, ge=1, le=INT32_MAX, description="Of hosted tools, of which none runs here."
    )
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    # Without a value these have the default of the model's generation_config.json.
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX, description="0 and -1 are off.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: Seed | None = None
    stop: StopStringList = Field(default_factory=list)
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    include: list[Includable] = Field(default_factory=list, max_length=64)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Metadata = Field(default_factory=dict)
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] = (
        "auto"
    )
    safety_identifier: Annotated[Text, Field(max_length=1024)] | None = None
    user: Annotated[Text, Field(max_length=1024)] | None = None
    cache_salt: CacheSalt | None = None
    generate: bool = Field(
        default=True, description="`false` reads the prompt into the cache, and has no output."
    )
    prompt_cache_options: ResponseCacheOptions | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: Timeout = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if not self.input and self.instructions is None and self.before is None:
            raise field_error("there is nothing to respond to", "input")
        return self

    @model_validator(mode="after")
    def _check_own_tools(self) -> Self:
        # Tools may be among the items that it goes on from.
        if self.before is None:
            check_tools(self.tools, all_tools(self.tools, self.input), self.tool_choice)
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.conversation is not None and self.previous_response_id is not None:
            raise field_error("this cannot be used with previous_response_id", "conversation")
        if self.background and not self.store:
            raise field_error("this needs store: true", "background")
        if self.stream_options is not None and not self.stream:
            raise field_error("this needs stream: true", "stream_options")
        return self

    @property
    def before(self) -> Before | None:
        """What it goes on from."""
        if self.conversation is not None:
            return Before("conversation", self.conversation)
        if self.previous_response_id is not None:
            return Before("previous_response_id", self.previous_response_id)
        return None

    @property
    def queue_priority(self) -> Priority:
        return SERVICE_TIERS[self.service_tier]

    @property
    def generates(self) -> bool:
        options = self.prompt_cache_options
        return self.generate and not (options is not None and options.prewarm)

    @property
    def num_logprobs(self) -> int | None:
        """Log probabilities of so many tokens beside each sampled one; None is without."""
        if LOGPROBS in self.include or self.top_logprobs:
            return self.top_logprobs or 0
        return None

    def prompt_truncation(self) -> Truncation | None:
        if self.truncation == "disabled":
            return None
        return Truncation(None, self.max_output_tokens or DEFAULT_RESERVED)

    def to_generation_params(self) -> GenerationParams:
        return GenerationParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=self.stop,
            max_tokens=self.max_output_tokens if self.generates else 0,
            logprobs=self.num_logprobs,
            cache_salt=self.cache_salt,
            retention=self.retention(),
        )
