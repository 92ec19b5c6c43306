"""`POST /v1/responses`."""

from collections.abc import Callable, Sequence
from functools import partial
from time import time
from typing import Final, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from app.api.openai.responses.conversation import REASONING, to_conversation, unsealed
from app.api.openai.responses.event_writer import OutputOptions
from app.api.openai.responses.input_items import InputItem, all_tools, new_item_id
from app.api.openai.responses.output_items import ResponseObject
from app.api.openai.responses.request import ENCRYPTED_REASONING, ResponseRequest
from app.api.openai.responses.response_writer import ResponseWriter
from app.api.openai.responses.run import ResponseRun, Save
from app.api.openai.responses.stored import OwnResponses, stored_input
from app.api.openai.responses.tools import check_tool_choice
from app.api.schemas.errors import EVENT_RESPONSES
from app.api.serving import admit, build_job_async, client_of, engine_for, prepared, take_ticket
from app.generation.job import GenerationJob
from app.generation.submit import submit
from app.http.json_body import JsonRoute
from app.parsing.formats.model_format import message_format
from app.prompts.chat import PreparedChat, prepare_chat
from app.prompts.conversation import Conversation
from app.prompts.render import chat_prompt
from app.server_state import server_state
from batching import EngineThread, InvalidRequest

router = APIRouter(route_class=JsonRoute)


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# What layers below call a field, and what it is called here.
_PARAMS: Final = {"messages": "input", "max_tokens": "max_output_tokens"}


@router.get("/v1/responses", include_in_schema=False)
async def refuse_upgrade(request: Request) -> Response:
    """Say that there are no WebSockets here; clients that look for one go on with POST."""
    if request.headers.get("upgrade", "").lower() == "websocket":
        headers = {"Upgrade": "HTTP/1.1"}
        raise HTTPException(426, "WebSockets are not supported; use POST", headers)
    raise HTTPException(405, headers={"Allow": "POST"})


@router.post("/v1/responses", response_model=ResponseObject, responses=EVENT_RESPONSES)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Respond to items of input; with `stream: true` as server-sent events."""
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        engine = await engine_for(request, body.model)
        try:
            items = await _all_items(request, body)
            job = await _build_job(request, engine, body, items)
            generation = await submit(engine, job, admitted)
        except InvalidRequest as error:
            _rename(error)
            raise
    writer = ResponseWriter(_response(body, job), _output_options(request, engine, body, items))
    run = ResponseRun(generation, writer, _save(request, body, items))
    if body.background:
        return await run.detached(request)
    return run.stream(request) if body.stream else await run.whole(request)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponseRequest, request: Request) -> InputTokens:
    """Count the tokens of the prompt that a request becomes."""
    with await take_ticket(request):
        engine = await engine_for(request, body.model)
        model = engine.model
        try:
            conversation = _conversation(request, body, await _all_items(request, body))
            prompt = await prepared(
                request, lambda: chat_prompt(model, conversation(), message_format(model))
            )
        except InvalidRequest as error:
            _rename(error)
            raise
        return InputTokens(input_tokens=len(prompt.token_ids))


async def _all_items(request: Request, body: ResponseRequest) -> list[InputItem]:
    """Return the items of the response before, and those of the request."""
    items = await OwnResponses(request).resolved(body.previous_response_id, body.input)
    try:
        check_tool_choice(all_tools(body.tools, items), body.tool_choice)
    except PydanticCustomError as error:
        raise InvalidRequest("tool_choice", error.message()) from None
    return items


async def _build_job(
    request: Request, engine: EngineThread, body: ResponseRequest, items: Sequence[InputItem]
) -> GenerationJob:
    conversation = _conversation(request, body, items)

    def prepare() -> PreparedChat:
        return prepare_chat(
            engine.model,
            conversation(),
            grammar=body.text.format.grammar(),
            truncation=body.prompt_truncation(),
        )

    chat = await prepared(request, prepare)
    return await build_job_async(
        request,
        engine,
        [chat.prompt.token_ids],
        body.to_generation_params(),
        completion_id=new_item_id("resp"),
        output=chat.output,
    )


def _conversation(
    request: Request, body: ResponseRequest, items: Sequence[InputItem]
) -> Callable[[], Conversation]:
    """Return what makes the conversation, for another thread."""
    num_before, sealer = len(items) - len(body.input), server_state(request).sealer
    return lambda: to_conversation(body, unsealed(items, sealer, num_before))


def _rename(error: InvalidRequest) -> None:
    error.param = _PARAMS.get(error.param or "", error.param)


def _output_options(
    request: Request, engine: EngineThread, body: ResponseRequest, items: Sequence[InputItem]
) -> OutputOptions:
    seal = partial(server_state(request).sealer.seal, REASONING)
    return OutputOptions(
        tools=all_tools(body.tools, items),
        is_summarized=body.reasoning.is_summarized,
        seal=seal if ENCRYPTED_REASONING in body.include else None,
        token_bytes=None if body.num_logprobs is None else engine.grammars.token_bytes,
    )


def _save(request: Request, body: ResponseRequest, items: Sequence[InputItem]) -> Save:
    """Return what keeps a response, if the client wants that.

    A line of a batch has its response in a file: by default it does not displace stored ones.
    """
    is_line = client_of(request).is_batch and "store" not in body.model_fields_set
    if is_line or not body.store:
        return _forget
    return partial(OwnResponses(request).put, input_items=partial(stored_input, items))


async def _forget(response: ResponseObject) -> None:
    """Keep nothing."""


def _response(body: ResponseRequest, job: GenerationJob) -> ResponseObject:
    """Return the response before its first token."""
    choice = body.tool_choice
    tier = "default" if body.service_tier == "auto" else body.service_tier
    return ResponseObject(
        id=job.completion_id,
        object="response",
        created_at=int(time()),
        completed_at=None,
        status="queued" if body.background else "in_progress",
        background=body.background,
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata,
        model=job.model_id,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning.echo(),
        safety_identifier=body.safety_identifier,
        service_tier=tier,
        temperature=job.spec.sampling.temperature,
        text={"format": body.text.format.echo(), "verbosity": body.text.verbosity},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        tools=[tool.model_dump() for tool in body.tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=job.spec.sampling.top_p,
        truncation=body.truncation,
        usage=None,
        user=body.user,
    )
