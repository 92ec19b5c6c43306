"""`POST /v1/completions`."""

from collections.abc import Sequence
from itertools import accumulate

import anyio
from fastapi import APIRouter, Request, Response

from app.admission.controller import AdmissionTicket
from app.api.openai.completions.request import Completion, CompletionRequest
from app.api.openai.completions.response_builder import CompletionResponseBuilder, PromptText
from app.api.response_builder import head, new_id
from app.api.schemas.errors import EVENT_RESPONSES
from app.api.serving import (
    admitted,
    check_choices,
    demands_of,
    engine_for,
    num_tokens_of,
    respond,
    respond_whole,
)
from app.generation.beam_search import BeamSearch
from app.generation.detokenizer import Detokenizer
from app.generation.generation import Generation
from app.generation.submit import (
    GenerationParams,
    GrammarSpec,
    generate,
    text_options,
    truncated,
)
from app.http.json_body import JsonRoute
from app.prompts.render import completion_prompt
from app.server_state import server_state
from batching import EngineThread, InvalidRequest, ModelInfo

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", response_model=Completion, responses=EVENT_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue texts; with `stream: true` as server-sent events."""
    check_choices(request, body)
    async with admitted(request, body) as place:
        engine = await engine_for(request, body.model)
        max_prompt_tokens = server_state(request).settings.max_queued_tokens
        prompts = await anyio.to_thread.run_sync(_prompts, engine.model, body, max_prompt_tokens)
        wanted = await _demands(request, engine, body)
        room = engine.model.max_model_len - max(map(len, prompts))
        max_tokens = body.max_tokens or min(body.num_reserved_tokens, max(room, 1))
        num_tokens_of(request, engine, body, prompts, max_tokens)
        engine.check(prompts, max_tokens, wanted.sampling)
        reply = await _reply(engine, prompts, body)
        answering = await _answering(engine, prompts, body, wanted, max_tokens, reply, place)
    if isinstance(answering, BeamSearch):
        return await respond_whole(request, answering, reply)
    return await respond(request, answering, reply, stream=body.stream)


async def _demands(
    request: Request, engine: EngineThread, body: CompletionRequest
) -> GenerationParams:
    return await demands_of(
        request,
        engine,
        body,
        grammar=_grammar(body),
        prompt_logprobs=body.logprobs if body.echo else None,
    )


async def _reply(
    engine: EngineThread, prompts: Sequence[Sequence[int]], body: CompletionRequest
) -> CompletionResponseBuilder:
    return CompletionResponseBuilder(
        head=head(new_id("cmpl"), engine.model.model_id),
        include_usage=body.include_usage,
        num_answers=body.n,
        num_compared=body.n if body.use_beam_search else body.num_choices,
        echoed=await anyio.to_thread.run_sync(_echoed, engine.model, prompts) if body.echo else (),
        token_bytes=None if body.logprobs is None else engine.grammars.token_bytes,
    )


async def _answering(
    engine: EngineThread,
    prompts: Sequence[Sequence[int]],
    body: CompletionRequest,
    wanted: GenerationParams,
    max_tokens: int,
    reply: CompletionResponseBuilder,
    place: AdmissionTicket,
) -> Generation | BeamSearch:
    if not body.use_beam_search:
        return await generate(
            engine,
            prompts,
            body,
            wanted,
            completion_id=reply.head["id"],
            max_tokens=max_tokens,
            place=place,
        )
    place.hold(sum(map(len, prompts)))
    return BeamSearch(
        engine=engine,
        prompts=prompts,
        width=body.num_choices,
        num_answers=body.n,
        max_tokens=max_tokens,
        length_penalty=body.length_penalty,
        end_token_ids=wanted.stop_token_ids,
        options=text_options(engine.model, body, wanted),
        num_logprobs=body.logprobs or 0,
        priority=body.queue_priority,
        cache_salt=place.cache_salt(body.cache_salt),
        completion_id=reply.head["id"],
        place=place,
    )


def _prompts(model: ModelInfo, body: CompletionRequest, max_tokens: int) -> list[list[int]]:
    """Return the tokens of each prompt; several have `max_tokens` together at most."""
    prompts: list[list[int]] = []
    num_tokens = 0
    for prompt in body.prompt:
        tokens = completion_prompt(
            model,
            prompt,
            add_special_tokens=body.add_special_tokens,
            num_kept=body.truncate_prompt_tokens,
        )
        prompts.append(truncated(model, tokens, body))
        num_tokens += len(prompts[-1])
        # Before the next one is tokenized, which is what takes time.
        if len(body.prompt) > 1 and num_tokens > max_tokens:
            message = f"{max_tokens} are the most tokens of all prompts together"
            raise InvalidRequest("prompt", message)
    return prompts


def _grammar(body: CompletionRequest) -> GrammarSpec | None:
    if body.structured_outputs is None:
        return None
    return GrammarSpec(body.structured_outputs.grammar(), "structured_outputs")


def _echoed(model: ModelInfo, prompts: Sequence[Sequence[int]]) -> list[PromptText]:
    return [_prompt_text(model, prompt) for prompt in prompts]


def _prompt_text(model: ModelInfo, prompt: Sequence[int]) -> PromptText:
    detokenizer = Detokenizer(model.tokenizer)
    pieces = [*map(detokenizer.add, prompt), detokenizer.flush()]
    offsets = list(accumulate(map(len, pieces), initial=0))[: len(prompt)]
    return PromptText("".join(pieces), prompt, offsets)
