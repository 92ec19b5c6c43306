"""`POST /infill`: what stands between two texts, as llama.cpp's editor plug-ins ask for it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from app.api.llama_cpp.line_limits import LineLimits
from app.api.llama_cpp.request import InfillRequest
from app.api.openai.response_builder import error_event, new_id
from app.api.openai.schemas.usage import Timings
from app.api.schemas.errors import ERROR_RESPONSES, EVENT_RESPONSES
from app.api.serving import admit, build_job_async, engine_for, json_response, prepared
from app.api.sse import EventStream
from app.generation.choice import Delta
from app.generation.generation import ChoiceResult, Generation, GenerationSummary
from app.generation.submit import submit
from app.http.json_body import JsonRoute
from app.parsing.events import ContentPiece, MessageEvent
from app.parsing.output_format import OutputFormat
from app.prompts.fill_in import ExtraFile, fill_in_prompt
from batching import FinishReason

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


class Infill(BaseModel):
    """llama.cpp's names; in a stream only the last event has all of them."""

    content: str
    stop: bool
    index: int = 0
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    timings: Timings | None = None


@router.post("/infill", response_model=Infill, responses=EVENT_RESPONSES)
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fill in what stands between two texts; with `stream: true` as server-sent events."""
    limits = LineLimits(body.n_indent, max(0, body.t_max_predict_ms) / 1000)
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        engine = await engine_for(request, body.model, is_streamed=body.stream)
        made = await prepared(
            request,
            partial(
                fill_in_prompt,
                engine.model,
                "input_suffix",
                body.input_prefix + body.prompt,
                body.input_suffix,
                [ExtraFile(each.filename, each.text) for each in body.input_extra],
                body.num_reserved,
            ),
        )
        job = await build_job_async(
            request,
            engine,
            [made.token_ids],
            replace(body.params(), stop_token_ids=made.ends),
            completion_id=new_id("infill"),
            output=OutputFormat(new_parser=lambda: limits),
        )
        generation = await submit(engine, job, admitted)
    builder = _Builder(engine.model.model_id, body.response_fields, limits, made.is_cut)
    if body.stream:
        return EventStream(_events(generation, builder), failed=error_event)
    return await json_response(request, generation, builder.whole)


@dataclass(frozen=True, slots=True)
class _Builder:
    """names: the fields of the response, all without any; `a/b` is a member of `a`."""

    model_id: str
    names: Sequence[str]
    limits: LineLimits
    is_cut: bool

    def whole(self, results: Sequence[ChoiceResult], summary: GenerationSummary) -> str:
        (result,) = results
        text = _text(result.events)
        return to_json(self.last(text, result.finish_reason, result.stop, summary)).decode()

    def last(
        self, text: str, reason: FinishReason, stop: str | None, summary: GenerationSummary
    ) -> dict[str, Any]:
        usage = summary.usage
        is_limit = self.limits.is_finished or reason is FinishReason.LENGTH
        by_token = "limit" if is_limit else "eos"
        fields = Infill(
            content=text,
            stop=True,
            model=self.model_id,
            tokens_predicted=usage.num_output_tokens,
            tokens_evaluated=usage.num_prompt_tokens,
            tokens_cached=usage.num_prompt_tokens + usage.num_output_tokens,
            truncated=self.is_cut,
            stop_type=by_token if stop is None else "word",
            stopping_word=stop or "",
            timings=Timings.of(summary.sequences, usage),
        ).model_dump()
        if not self.names:
            return fields
        fields |= {f"timings/{name}": value for name, value in fields["timings"].items()}
        return {name: fields[name] for name in self.names if name in fields}


async def _events(generation: Generation, builder: _Builder) -> AsyncIterator[bytes]:
    last: Delta | None = None
    async for item in generation:
        assert isinstance(item, Delta), "no progress is requested"
        if text := _text(item.events):
            yield _event({"index": 0, "content": text, "stop": False})
        last = item
    assert last is not None and last.finish_reason is not None, "the last delta has a reason"
    yield _event(builder.last("", last.finish_reason, last.stop, generation.summary))


def _text(events: Sequence[MessageEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentPiece))


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + to_json(fields) + b"\n\n"
