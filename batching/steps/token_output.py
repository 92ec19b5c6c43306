"""The outputs of the engine for a request, step by step."""

from enum import StrEnum
from typing import NamedTuple

from batching.pooling import Vector


class FinishReason(StrEnum):
    """Why a completion ended, in the terms of OpenAI and vLLM.

    The scheduler sets STOP and LENGTH; the layers above the engine set the others.
    """

    STOP = "stop"
    LENGTH = "length"
    # The reason of a choice in the layer that parses text; its sequence ends with STOP.
    TOOL_CALLS = "tool_calls"
    # The client disconnected, or the layer above needs no more of it.
    ABORT = "abort"
    # The request's deadline has passed.
    TIMEOUT = "timeout"
    ERROR = "error"


class TokenLogprobs(NamedTuple):
    """The log probability of one token and of its alternatives, from the unmodified logits.

    logprob: natural logarithm of the probability of the token at this position.
    top: pairs of token id and log probability: the most probable tokens in descending order, or the
        tokens of `logprob_token_ids` in the order of the request.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(NamedTuple):
    """The output of one step for one request.

    token_ids: the new tokens; several if drafts were accepted, none in an output that only reports
        progress or carries an embedding.  A stop token that ended the request is included.
    finish_reason: None unless the request ends with this output.
    num_cached_tokens: prompt tokens that were taken from the prefix cache.
    logprobs: one entry per token, if the request asks for them.
    prompt_logprobs: one entry per prompt token except the first; only in the first output, if the
        request asks for them.
    num_read_tokens: prompt tokens prefilled so far, in an output that only reports progress.
    scheduled_time: when the first step of the prefill began, in seconds on the engine's clock.
    num_preemptions: how often the request has been preempted so far.
    embedding: the vector of a request with `pooling`, which generates no tokens.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_read_tokens: int = 0
    scheduled_time: float = 0.0
    num_preemptions: int = 0
    embedding: Vector | None = None

    @property
    def is_progress(self) -> bool:
        """True if the output only reports the progress of the prefill."""
        return not self.token_ids and self.embedding is None
