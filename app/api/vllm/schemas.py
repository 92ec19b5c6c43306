"""`/tokenize` and `/detokenize` with vLLM's fields, and the rendered prompt of a chat request."""

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from app.api.openai.chat.conversation import ConversationOptions
from app.api.openai.chat.messages import Messages
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import MAX_TOKEN_IDS, Text, TokenId, field_error


class TokenizeRequest(ConversationOptions):
    """The tokens of a text, or of the prompt that a conversation becomes."""

    model: Text | None = Field(default=None, description="The default model if left out.")
    prompt: Text | None = None
    messages: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = Field(
        default=None, description="True for a text; a chat template writes its own."
    )
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if not self.messages and self.prompt is None:
            raise field_error("it is missing, and so is messages", "prompt")
        if self.messages and self.prompt is not None:
            raise field_error("it cannot be combined with prompt", "messages")
        if not self.messages:
            for name in sorted(self.model_fields_set & ConversationOptions.model_fields.keys()):
                raise field_error("this needs messages", name)
        return self


class TokenizeResponse(BaseModel):
    """`token_strs` is null unless it is requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    model: Text | None = Field(default=None, description="The default model if left out.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)]


class DetokenizeResponse(BaseModel):
    prompt: str


class RenderedPrompt(BaseModel):
    """The prompt of a chat request: its text, and the tokens of that.

    token_ids: vLLM's name, by which routers find the prompt's cached prefix; `tokens` is that of `/tokenize`.
    """

    prompt: str
    count: int
    max_model_len: int
    token_ids: list[int]
    tokens: list[int]
