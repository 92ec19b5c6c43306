"""Turns the sampled tokens of a step into the output of each request."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from batching.errors import EngineError
from batching.pooling import Vector
from batching.request import BatchRequest, RequestStatus
from batching.steps.sequences import accepted
from batching.steps.step_plan import Slice, SliceOutput
from batching.steps.token_output import TokenLogprobs, TokenOutput


class RequestOutput(NamedTuple):
    request_id: int
    output: TokenOutput


class RequestFailure(NamedTuple):
    request_id: int
    error: EngineError


def append_sampled(request: BatchRequest, s: Slice, output: SliceOutput) -> tuple[int, ...]:
    """Append the sampled tokens of a slice to its request, until that ends; return them."""
    is_complete = request.request_id in output.completed
    note_free(request, output)
    appended: list[int] = []
    for token_id in accepted(s, output):
        request.append(token_id, is_complete=is_complete)
        appended.append(token_id)
        if request.finish_reason is not None:
            break
    return tuple(appended)


def note_free(request: BatchRequest, output: SliceOutput) -> None:
    """Note how many of the next tokens of a request need no mask, if it has a constraint."""
    if output.num_free:
        request.num_free = dict(output.num_free).get(request.request_id, request.num_free)


def token_output(
    request: BatchRequest, token_ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs]
) -> TokenOutput:
    """Return the output of a step that appended these tokens to a request."""
    is_first = request.num_output_tokens == len(token_ids)
    return TokenOutput(
        token_ids,
        request.finish_reason,
        request.num_cached_tokens,
        tuple(logprobs),
        tuple(request.prompt_logprobs) if is_first else (),
        scheduled_time=request.scheduled_time or 0.0,
        num_preemptions=request.num_preemptions,
    )


def embedding_output(request: BatchRequest, vector: Vector) -> RequestOutput:
    """Return the only output of a pooled request."""
    output = token_output(request, (), ())._replace(embedding=vector)
    return RequestOutput(request.request_id, output)


def progress_outputs(request: BatchRequest) -> Iterator[RequestOutput]:
    """Yield a progress report if the request asks for reports and is still prefilling."""
    if request.spec.reports_progress and request.status is RequestStatus.PREFILLING:
        output = TokenOutput(
            (), None, request.num_cached_tokens, num_read_tokens=request.num_computed_tokens
        )
        yield RequestOutput(request.request_id, output)
