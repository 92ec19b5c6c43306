"""`/tokenize` and `/detokenize`, in vLLM's words, and what a chat request becomes."""

from typing import Annotated, Final

from pydantic import BaseModel, Field

from app.schemas.fields import Text, TokenId
from app.schemas.wire import WireRequest

_MAX_TOKENS: Final = 1 << 20


class TokenizeRequest(WireRequest):
    model: Text | None = Field(default=None, description="The default model if left out.")
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeResponse(BaseModel):
    """`token_strs` only if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireRequest):
    model: Text | None = Field(default=None, description="The default model if left out.")
    tokens: Annotated[list[TokenId], Field(max_length=_MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    prompt: str


class RenderedPrompt(BaseModel):
    """What the model sees of a chat request: its text, and the tokens of that."""

    prompt: str
    count: int
    max_model_len: int
    tokens: list[int]
