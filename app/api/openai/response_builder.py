"""The common parts of chat and completions responses, streamed or not."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from time import time
from typing import Any, Final, Protocol
from uuid import uuid4

from fastapi import Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from app.api.openai.schemas.response_options import ResponseOptions
from app.api.openai.schemas.usage import PromptProgressChunk, Timings, Usage
from app.api.serving import SHORT, json_response, writer, written
from app.api.sse import EventStream
from app.generation.choice import Delta
from app.generation.generation import ChoiceResult, Generation, GenerationSummary, PromptProgress
from app.http.errors.formats import openai_error
from app.http.errors.responses import stream_error_report
from app.http.streams.late_head import Opening
from app.parsing.events import ContentPiece, MessageEvent, ReasoningPiece

DONE: Final = b"data: [DONE]\n\n"

# A seeded output depends on these, besides the model.
_PACKAGES: Final = ("mlx", "mlx-lm")


class ResponseBuilder(Protocol):
    """Builds the response or the chunks of one generation in the format of one endpoint."""

    @property
    def options(self) -> ResponseOptions: ...

    @property
    def num_echoed(self) -> int:
        """Characters and tokens of prompts that the response repeats, in all choices."""

    def first_chunks(self, num_choices: int) -> Iterable[BaseModel]: ...

    def progress_chunk(self, progress: PromptProgress) -> BaseModel: ...

    def delta_chunks(self, delta: Delta) -> Iterable[BaseModel]: ...

    def final_chunks(self, summary: GenerationSummary) -> Iterable[BaseModel]: ...

    def full_response(
        self, results: Sequence[ChoiceResult], summary: GenerationSummary
    ) -> BaseModel: ...


async def respond(
    request: Request, generation: Generation, builder: ResponseBuilder, *, stream: bool
) -> Response:
    """Return the response to a request, streamed or not."""
    if stream:
        return EventStream(chunk_events(request, generation, builder), failed=error_events)
    write = writer(builder.full_response)
    return await json_response(request, generation, write, num_echoed=builder.num_echoed)


async def chunk_events(
    request: Request, generation: Generation, builder: ResponseBuilder
) -> AsyncIterator[bytes]:
    """Yield the chunks as events, and then `[DONE]`."""
    options = builder.options
    text_events = TextEvents(builder)
    fields = running_fields(generation, options)
    first = builder.first_chunks(generation.num_choices)
    is_long = builder.num_echoed > SHORT
    for event in await _events(request, first, fields, is_long=is_long):
        yield Opening(event)
    async for item in generation:
        if isinstance(item, PromptProgress):
            # Who asks for it waits for it: it is no opening.
            yield _event(builder.progress_chunk(item))
            continue
        fields = running_fields(generation, options)
        if not fields and text_events.can_write(item):
            for event in text_events.write(item):
                yield event
            continue
        chunks, is_long = builder.delta_chunks(item), _is_long(item, builder)
        for event in await _events(request, chunks, fields, is_long=is_long):
            yield event
    for chunk in builder.final_chunks(generation.summary):
        yield _event(chunk)
    yield DONE


async def error_event(error: Exception) -> bytes:
    """Return the event of what ended a stream."""
    return f"data: {openai_error(stream_error_report(error))}\n\n".encode()


async def error_events(error: Exception) -> bytes:
    """Return `error_event` and the `[DONE]` behind it."""
    return await error_event(error) + DONE


class TextEvents:
    """Encodes deltas that only add a piece of text, which most do, with the same bytes as `_event`.

    All chunks of such deltas differ only in the text.  So one chunk is encoded per choice and kind of piece,
    with a placeholder that occurs nowhere else, and each text is inserted there.
    """

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._mark = uuid4().hex
        self._templates: dict[tuple[int, type[MessageEvent]], list[list[bytes]]] = {}

    def can_write(self, delta: Delta) -> bool:
        return (
            len(delta.events) == 1
            and isinstance(delta.events[0], ContentPiece | ReasoningPiece)
            and not (delta.is_first or delta.tokens or delta.finish_reason)
            and not self._builder.options.return_token_ids
        )

    def write(self, delta: Delta) -> Iterator[bytes]:
        (piece,) = delta.events
        assert isinstance(piece, ContentPiece | ReasoningPiece)
        key = delta.index, type(piece)
        if (template := self._templates.get(key)) is None:
            template = self._templates[key] = self._template(delta, type(piece)(self._mark))
        text = to_json(piece.text)
        for parts in template:
            yield text.join(parts)

    def _template(self, delta: Delta, piece: MessageEvent) -> list[list[bytes]]:
        """Return the events of a delta with this piece, each split at the mark."""
        chunks = self._builder.delta_chunks(replace(delta, events=[piece]))
        return [_event(chunk).split(to_json(self._mark)) for chunk in chunks]


def _is_long(delta: Delta, builder: ResponseBuilder) -> bool:
    """Return whether the chunks of a delta repeat a long prompt, or have many log probabilities."""
    num_logprobs = sum(1 + len(each.logprobs.top) for each in delta.tokens)
    num_logprobs += sum(1 + len(each.top) for each in delta.prompt_logprobs)
    return num_logprobs > SHORT or (delta.is_first and builder.num_echoed > SHORT)


async def _events(
    request: Request, chunks: Iterable[BaseModel], fields: Mapping[str, BaseModel], *, is_long: bool
) -> Iterable[bytes]:
    """Return chunks, which are made as they are iterated, as events; another thread writes long ones."""
    if is_long:
        return [await written(request, partial(_frames, chunks, fields))]
    return (_event(chunk, fields) for chunk in chunks)


def _event(chunk: BaseModel, fields: Mapping[str, BaseModel] | None = None) -> bytes:
    return _frame(chunk, fields).encode()


def _frames(chunks: Iterable[BaseModel], fields: Mapping[str, BaseModel]) -> str:
    return "".join(_frame(chunk, fields) for chunk in chunks)


def _frame(chunk: BaseModel, fields: Mapping[str, BaseModel] | None) -> str:
    if fields:
        chunk = chunk.model_copy(update=fields)
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def new_id(prefix: str) -> str:
    """Return the id of a completion."""
    return f"{prefix}-{uuid4().hex}"


def common_fields(completion_id: str, model_id: str) -> dict[str, Any]:
    """Return the fields that a response, or all chunks of one, have in common."""
    return {
        "id": completion_id,
        "created": int(time()),
        "model": model_id,
        "system_fingerprint": system_fingerprint(model_id),
    }


def running_fields(generation: Generation, options: ResponseOptions) -> dict[str, Any]:
    """Return the fields of every chunk that say how far the request is, if any are requested."""
    if not (options.includes_running_usage or options.timings_per_token):
        return {}
    summary = generation.summary
    return summary_fields(
        summary,
        with_usage=options.includes_running_usage,
        # The engine is ahead of what is streamed.
        with_timings=options.timings_per_token and summary.usage.num_output_tokens > 0,
    )


def summary_fields(
    summary: GenerationSummary, *, with_usage: bool = True, with_timings: bool = False
) -> dict[str, Any]:
    """Return the requested ones of the fields `usage` and `timings`, which begin with the output."""
    fields: dict[str, Any] = {"usage": Usage.of(summary.usage)} if with_usage else {}
    started = [each for each in summary.sequences if each.first_token_time is not None]
    if with_timings and started:
        fields["timings"] = Timings.of(started, summary.usage)
    return fields


def progress_field(progress: PromptProgress) -> PromptProgressChunk:
    return PromptProgressChunk(
        total=progress.num_prompt_tokens,
        cache=progress.num_cached_tokens,
        processed=progress.num_prefilled_tokens,
        time_ms=round(progress.elapsed * 1000),
    )


@cache
def system_fingerprint(model_id: str) -> str:
    """Return a name for all that a seeded output depends on: the model and the arithmetic."""
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    return f"fp_{sha256(' '.join([model_id, *versions]).encode()).hexdigest()[:12]}"
