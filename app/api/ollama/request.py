"""The requests of `/api/chat` and `/api/generate`."""

from abc import abstractmethod
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from app.api.ollama.fields import (
    Format,
    Images,
    KeepAlive,
    Options,
    Think,
    format_grammar,
    with_images,
)
from app.api.ollama.messages import Turns, chat_messages
from app.api.openai.schemas.tool_calling.tools import Tool, ToolList
from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import Text, field_error
from app.generation.params import GenerationParams
from app.parsing.output_format import GrammarSpec
from app.prompts.conversation import ChatMessage, Conversation
from app.prompts.images.image_marks import Attachment, attachments_in

_UNSUPPORTED: Final[Defaults] = {"shift": (False,)}


class AnswerRequest(RequestModel):
    """What both have."""

    defaults = _UNSUPPORTED

    model: Text = Field(min_length=1, description="An id or alias, also with `:latest`.")
    stream: bool = True
    format: Format = None
    think: Think = None
    keep_alive: KeepAlive = None
    options: Options = Field(default_factory=Options)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise field_error("this needs logprobs: true", "top_logprobs")
        return self

    def params(self) -> GenerationParams:
        return self.options.params(self.top_logprobs if self.logprobs else None)

    def grammar(self) -> GrammarSpec | None:
        return format_grammar(self.format)

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True if the request only loads or unloads the model."""

    @property
    @abstractmethod
    def attachments(self) -> dict[str, Attachment]:
        """The images, by their marks."""

    @abstractmethod
    def to_conversation(self) -> Conversation:
        """Return the input of the chat template."""

    def _conversation(self, messages: list[ChatMessage], **fields: Any) -> Conversation:
        last = messages[-1]
        return Conversation(
            messages=messages,
            thinking=None if self.think is None else bool(self.think),
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            continue_final_message=last.role == "assistant" and not last.tool_calls,
            # Ollama's templates take turns in any order.
            adapt_turns=True,
            **fields,
        )


class ChatRequest(AnswerRequest):
    messages: Turns = Field(default_factory=list, description="None loads or unloads the model.")
    tools: ToolList = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if not all(isinstance(tool, Tool) for tool in self.tools):
            raise field_error("a tool must be of the type function", "tools")
        return self

    @property
    def is_empty(self) -> bool:
        return not self.messages

    @property
    def attachments(self) -> dict[str, Attachment]:
        found: dict[str, Attachment] = {}
        for index, turn in enumerate(self.messages):
            found |= attachments_in(turn.marked_content, f"messages.{index}.images")
        return found

    def to_conversation(self) -> Conversation:
        specs = [tool.to_spec() for tool in self.tools]
        choice: Literal["auto", "none"] = "auto" if specs else "none"
        return self._conversation([*chat_messages(self.messages)], tools=specs, tool_choice=choice)


class GenerateRequest(AnswerRequest):
    defaults: ClassVar[Defaults] = {
        **_UNSUPPORTED,
        # Templates of Go are none of Jinja.
        "template": ("",),
        "context": ([],),
    }

    prompt: Text = Field(default="", description="None loads or unloads the model.")
    suffix: Text = Field(
        default="", description="What stands between `prompt` and it is filled in."
    )
    system: Text = ""
    raw: bool = Field(default=False, description="The prompt is not put into the template.")
    images: Images = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
        for name in ("system", "images"):
            if (self.raw or self.suffix) and getattr(self, name):
                other = "raw" if self.raw else "suffix"
                raise field_error(f"it cannot be combined with {other}", name)
        return self

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.images or self.suffix)

    @property
    def marked_prompt(self) -> str:
        return with_images(self.prompt, self.images)

    @property
    def attachments(self) -> dict[str, Attachment]:
        return attachments_in(self.marked_prompt, "images")

    def to_conversation(self) -> Conversation:
        messages = [ChatMessage(role="user", content=self.marked_prompt)]
        if self.system:
            messages.insert(0, ChatMessage(role="system", content=self.system))
        return self._conversation(messages)
