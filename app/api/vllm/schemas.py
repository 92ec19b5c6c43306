"""`/tokenize` and `/detokenize` with vLLM's fields, and the rendered prompt of a chat request."""

from typing import Annotated

from pydantic import BaseModel, Field

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import MAX_TOKEN_IDS, Text, TokenId


class TokenizeRequest(RequestModel):
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


class DetokenizeRequest(RequestModel):
    model: Text | None = Field(default=None, description="The default model if left out.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)]


class DetokenizeResponse(BaseModel):
    prompt: str


class RenderedPrompt(BaseModel):
    """What the model sees of a chat request: its text, and the tokens of that."""

    prompt: str
    count: int
    max_model_len: int
    tokens: list[int]
