"""Log probabilities of tokens, in responses.

Those of a long output are hundreds of thousands.  As models all together they take ten times the memory of
their JSON, so each is made while it is written.
"""

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, PlainSerializer, SkipValidation


class TopLogprob(BaseModel):
    """`bytes` are the token's: a character can be spread over several tokens."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


TokenLogprobs = Annotated[
    Iterable[TokenLogprob],
    SkipValidation,
    PlainSerializer(iter, return_type=Iterable[TokenLogprob]),
]


class ChoiceLogprobs(BaseModel):
    """Log probabilities of a chat completion."""

    content: TokenLogprobs
    refusal: None = None


class PromptLogprob(BaseModel):
    """A log probability of a prompt token; vLLM's.  `rank` counts from 1; null if it is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


# The log probabilities of tokens by id; None where nothing comes before a token.
PromptPosition = dict[str, PromptLogprob] | None
PromptLogprobs = Annotated[
    Iterable[PromptPosition],
    SkipValidation,
    PlainSerializer(iter, return_type=Iterable[PromptPosition]),
]


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion; null where nothing comes before a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
