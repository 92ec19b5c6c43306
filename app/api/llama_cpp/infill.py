"""`POST /infill`: what stands between two texts, as llama.cpp's editor plug-ins ask for it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from pydantic_core import to_json

from app.api.openai.response_builder import new_id
from app.api.openai.schemas.usage import Timings
from app.api.schemas.base import RequestModel
from app.api.schemas.errors import ERROR_RESPONSES, EVENT_RESPONSES
from app.api.schemas.fields import INT32_MAX, Seed, StopStringList, Text
from app.api.serving import admit, build_job_async, engine_for, json_response, prepared
from app.api.sse import EventStream
from app.generation.choice import Delta
from app.generation.generation import ChoiceResult, Generation, GenerationSummary
from app.generation.params import GenerationParams
from app.generation.submit import submit
from app.http.errors.formats import openai_error
from app.http.errors.responses import stream_error_report
from app.http.json_body import JsonRoute
from app.parsing.events import ContentPiece
from app.parsing.output_format import OutputFormat
from app.prompts.fill_in import ExtraFile, fill_in_prompt
from batching import FinishReason, Priority

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)

_MAX_FILES: Final = 256
_MAX_FIELDS: Final = 64


class Extra(RequestModel):
    text: Text
    filename: Text = "tmp"


class InfillRequest(RequestModel):
    """`samplers`, `t_max_predict_ms` and the like have no effect."""

    model: Text | None = Field(default=None, description="The default model if left out.")
    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[Extra], Field(max_length=_MAX_FILES)] = Field(default_factory=list)
    prompt: Text = Field(default="", description="Follows `input_prefix`.")
    n_predict: int = Field(
        default=-1, ge=-1, le=INT32_MAX, description="-1 is as many as fit; 0 only reads."
    )
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=100)
    seed: Seed | None = None
    stop: StopStringList = Field(default_factory=list)
    stream: bool = False
    response_fields: Annotated[list[Text], Field(max_length=_MAX_FIELDS)] = Field(
        default_factory=list, description="Only these, such as `timings/prompt_n`."
    )

    def params(self) -> GenerationParams:
        return GenerationParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            seed=None if self.seed == -1 else self.seed,
            stop=self.stop,
            max_tokens=None if self.n_predict < 0 else self.n_predict,
            clamp_max_tokens=True,
        )


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
    async with admit(request, priority=Priority.NORMAL, time_limit=None) as admitted:
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
            ),
        )
        job = await build_job_async(
            request,
            engine,
            [made.token_ids],
            replace(body.params(), stop_token_ids=made.ends),
            completion_id=new_id("infill"),
            output=OutputFormat(),
        )
        generation = await submit(engine, job, admitted)
    model_id = engine.model.model_id
    if body.stream:
        return EventStream(_events(generation, body, model_id))
    return await json_response(request, generation, partial(_whole, body, model_id))


def _whole(
    body: InfillRequest, model_id: str, results: Sequence[ChoiceResult], summary: GenerationSummary
) -> str:
    (result,) = results
    text = "".join(event.text for event in result.events if isinstance(event, ContentPiece))
    made = _end(model_id, text, result.finish_reason, result.stop, summary)
    return to_json(_chosen(made, body.response_fields)).decode()


async def _events(
    generation: Generation, body: InfillRequest, model_id: str
) -> AsyncIterator[bytes]:
    try:
        last: Delta | None = None
        async for item in generation:
            assert isinstance(item, Delta), "no progress is requested"
            text = "".join(event.text for event in item.events if isinstance(event, ContentPiece))
            if text:
                yield _event({"index": 0, "content": text, "stop": False})
            last = item
        assert last is not None and last.finish_reason is not None, "the last delta has a reason"
        made = _end(model_id, "", last.finish_reason, last.stop, generation.summary)
        yield _event(_chosen(made, body.response_fields))
    except Exception as error:
        yield f"data: {openai_error(stream_error_report(error))}\n\n".encode()


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + to_json(fields) + b"\n\n"


def _end(
    model_id: str, text: str, reason: FinishReason, stop: str | None, summary: GenerationSummary
) -> dict[str, Any]:
    usage = summary.usage
    by_token = "limit" if reason is FinishReason.LENGTH else "eos"
    return Infill(
        content=text,
        stop=True,
        model=model_id,
        tokens_predicted=usage.num_output_tokens,
        tokens_evaluated=usage.num_prompt_tokens,
        tokens_cached=usage.num_prompt_tokens + usage.num_output_tokens,
        truncated=False,
        stop_type=by_token if stop is None else "word",
        stopping_word=stop or "",
        timings=Timings.of(summary.sequences, usage),
    ).model_dump()


def _chosen(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of these names, all without any; `a/b` is a member of `a`."""
    if not names:
        return fields
    inner = {f"timings/{name}": value for name, value in fields["timings"].items()}
    return {name: (fields | inner)[name] for name in names if name in fields | inner}
