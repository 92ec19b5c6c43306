"""Requests of the engine, and slices of them, by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from batching.inputs.images import ImageInput, TowerArray
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import Slice, StepPlan


def make_request(
    request_id: int,
    prompt: Sequence[int],
    *,
    arrival_time: float = 0.0,
    **spec: Any,
) -> BatchRequest:
    """Return a request that waits; `spec` are fields of its spec."""
    if isinstance(spec.get("stop_token_ids"), set):
        spec["stop_token_ids"] = frozenset(spec["stop_token_ids"])
    made = SequenceSpec(prompt=tuple(prompt), **spec)
    return BatchRequest(request_id, made, arrival_time=arrival_time)


def image_of(contents: bytes, num_rows: int, *, sees_ahead: bool = False) -> ImageInput:
    """Return an image with a token before its rows."""
    pixels = TowerArray("pixels", "|u1", (len(contents),), contents)
    rows = tuple(range(1, num_rows + 1))
    return ImageInput((1, *(0,) * num_rows), rows, (pixels,), sees_ahead)


def slice_of(
    request: BatchRequest,
    start: int,
    stop: int,
    drafts: tuple[int, ...] = (),
    *,
    forks: Sequence[BatchRequest] = (),
    keep: tuple[int, ...] = (),
) -> Slice:
    """Return the slice `[start, stop)` of a request, wherever the request is, drafts included."""
    computed, request.num_computed_tokens = request.num_computed_tokens, start
    made = request.make_slice(stop, drafts, tuple(fork.request_id for fork in forks), keep)
    request.num_computed_tokens = computed
    return made


def plan_of(*requests: BatchRequest, slices: Sequence[Slice] = (), **fields: Any) -> StepPlan:
    """Return a plan that starts requests; without `slices` it reads the whole of each."""
    read = tuple(slices) or tuple(slice_of(r, 0, r.num_tokens) for r in requests)
    return replace(StepPlan(read, started=tuple(r.started() for r in requests)), **fields)


def specs(prompts: Sequence[Sequence[int]], **fields: Any) -> list[SequenceSpec]:
    """Return a spec for each prompt; they differ in nothing else."""
    return [SequenceSpec(prompt=tuple(prompt), **fields) for prompt in prompts]


def respec(request: BatchRequest, **fields: Any) -> BatchRequest:
    """Change fields of a request's spec."""
    request.spec = replace(request.spec, **fields)
    return request


def states_of(requests: Iterable[BatchRequest]) -> dict[int, SequenceState]:
    """Return what an executor knows of requests, those of one prompt included, by their ids."""
    everyone = [each for request in requests for each in (request, *request.forks)]
    return {each.request_id: SequenceState(each.started()) for each in everyone}
