"""`POST /v1/completions`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Final

from fastapi import APIRouter, Request, Response

from app.api.openai.completions.request import CompletionRequest
from app.api.openai.completions.response import Completion
from app.api.openai.completions.response_builder import CompletionResponseBuilder, PromptText
from app.api.openai.response_builder import common_fields, new_id, respond
from app.api.openai.schemas.sampling import check_num_choices
from app.api.schemas.errors import ERROR_RESPONSES, EVENT_RESPONSES
from app.api.serving import admit, build_job_async, engine_for, json_response, prepared, writer
from app.generation.detokenizer import Detokenizer
from app.generation.job import GenerationJob
from app.generation.params import GenerationParams
from app.generation.submit import search_beams, submit
from app.http.json_body import JsonRoute
from app.parsing.output_format import OutputFormat
from app.prompts.fill_in import fill_in_prompt, fill_in_tokens
from app.prompts.render import completion_prompt
from app.server_state import server_state
from batching import AsyncEngine, InvalidRequest, ModelInfo

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)

# Characters and tokens of all prompts, in all choices; in JSON a character has up to six bytes.
MAX_ECHOED: Final = 1 << 22


@router.post("/v1/completions", response_model=Completion, responses=EVENT_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts; with `stream: true` as server-sent events."""
    settings = server_state(request).settings
    check_num_choices(body, settings.max_choices)
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        engine = await engine_for(request, body.model, is_streamed=body.stream)
        grammar = await prepared(request, body.content_grammar)
        prompts = await prepared(
            request, partial(_prompts, engine.model, body, settings.max_queued_tokens)
        )
        job = await build_job_async(
            request,
            engine,
            prompts,
            _params(engine.model, body),
            completion_id=new_id("cmpl"),
            output=OutputFormat(grammar=grammar),
        )
        builder = await prepared(request, partial(_builder, engine, job, body))
        if job.beams is None:
            generation = await submit(engine, job, admitted)
        else:
            search = await search_beams(engine, job, admitted)
    if job.beams is not None:
        return await json_response(request, search, writer(builder.full_response))
    return await respond(request, generation, builder, stream=body.stream)


def _builder(
    engine: AsyncEngine, job: GenerationJob, body: CompletionRequest
) -> CompletionResponseBuilder:
    """Return what writes the response.

    Raises:
        InvalidRequest: the choices repeat more of the prompts than `MAX_ECHOED`.
    """
    builder = CompletionResponseBuilder(
        common_fields=common_fields(job.completion_id, engine.model.model_id),
        options=body,
        prompts=job.prompts,
        num_returned=body.n,
        num_candidates=body.n if body.use_beam_search else body.num_choices,
        echoed=[_prompt_text(engine.model, prompt) for prompt in job.prompts] if body.echo else (),
        token_bytes=engine.grammars.token_bytes,
        num_logprobs=body.logprobs,
    )
    if builder.num_echoed > MAX_ECHOED:
        message = (
            f"{builder.num_echoed} characters and tokens of prompts are repeated in all choices; "
            f"{MAX_ECHOED} are the most"
        )
        raise InvalidRequest("echo" if body.echo else "return_token_ids", message)
    return builder


def _prompts(model: ModelInfo, body: CompletionRequest, max_tokens: int) -> list[list[int]]:
    """Return the tokens of each prompt; several have `max_tokens` together at most."""
    prompts: list[list[int]] = []
    num_tokens = 0
    for prompt in body.prompt:
        prompts.append(_tokens(model, body, prompt))
        num_tokens += len(prompts[-1])
        # Before the next one is tokenized, which is what takes time.
        if len(body.prompt) > 1 and num_tokens > max_tokens:
            message = f"all prompts together may have at most {max_tokens} tokens"
            raise InvalidRequest("prompt", message)
    return prompts


def _tokens(model: ModelInfo, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if body.suffix and isinstance(prompt, str):
        return fill_in_prompt(model, "suffix", prompt, body.suffix).token_ids
    return completion_prompt(
        model,
        prompt,
        add_special_tokens=body.add_special_tokens,
        truncation=body.truncation(),
    )


def _params(model: ModelInfo, body: CompletionRequest) -> GenerationParams:
    params = body.to_generation_params()
    tokens = model.derived(fill_in_tokens) if body.suffix else None
    if tokens is None:
        return params
    return replace(params, stop_token_ids=[*params.stop_token_ids, *tokens.ends])


def _prompt_text(model: ModelInfo, prompt: Sequence[int]) -> PromptText:
    detokenizer = Detokenizer(model.tokenizer)
    pieces = [*map(detokenizer.add, prompt), detokenizer.flush()]
    offsets = list(accumulate(map(len, pieces), initial=0))[: len(prompt)]
    return PromptText("".join(pieces), prompt, offsets)
