"""`/v1/chat/completions`: the request."""

from typing import Self

from pydantic import Field, model_validator

from app.api.openai.chat.conversation import ConversationOptions
from app.api.openai.chat.messages import Messages
from app.api.openai.schemas import unsupported
from app.api.openai.schemas.sampling import GenerationRequest
from app.api.openai.schemas.structured_outputs import ResponseFormat
from app.api.schemas.fields import INT32_MAX, field_error
from app.parsing.output_format import GrammarSpec
from app.prompts.conversation import Conversation
from app.prompts.images.image_marks import Attachment
from app.prompts.render import DEFAULT_RESERVED


class ChatCompletionRequest(GenerationRequest, ConversationOptions):
    defaults = unsupported.CHAT
    # llama.cpp's clients send it.
    unlimited = ("max_tokens", *GenerationRequest.unlimited)

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_chat_fields(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise field_error("this needs logprobs: true", "top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise field_error("this needs logprobs: true", "logprob_token_ids")
        return self

    @property
    def content_formats(self) -> list[str]:
        has_format = self.response_format is not None and self.response_format.type != "text"
        return [*super().content_formats, *(["response_format"] if has_format else [])]

    @property
    def max_output_tokens(self) -> int | None:
        """`max_tokens` is the older name; None is as many as fit the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_reserved_tokens(self) -> int:
        """Without a limit of the request a truncated prompt leaves some room."""
        return self.max_output_tokens or max(DEFAULT_RESERVED, self.min_tokens)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def content_grammar(self) -> GrammarSpec | None:
        grammar = None if self.response_format is None else self.response_format.grammar()
        if grammar is None:
            return super().content_grammar()
        return GrammarSpec(grammar, "response_format")

    @property
    def attachments(self) -> dict[str, Attachment]:
        """The images and files of the conversation, by their marks."""
        return self.attachments_of(self.messages)

    def to_conversation(self) -> Conversation:
        return self.conversation_of(self.messages)
