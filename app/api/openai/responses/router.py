"""`POST /v1/responses`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from app.admission.admitted_request import AdmittedRequest
from app.api.attachments import attached_to
from app.api.openai.responses.compaction import CompactedResponse, compacted
from app.api.openai.responses.items.input_items import CompactionTrigger, new_item_id
from app.api.openai.responses.items.output_items import ResponseObject
from app.api.openai.responses.request import ResponseRequest
from app.api.openai.responses.resolved_request import ResolvedRequest, new_response, resolve
from app.api.openai.responses.response_writer import ResponseWriter
from app.api.openai.responses.run import ResponseRun, Save
from app.api.openai.responses.stored.inputs import stored_input
from app.api.openai.responses.stored.own import LATEST, OwnResponses
from app.api.schemas.errors import ERROR_RESPONSES, EVENT_RESPONSES
from app.api.serving import admit, build_job_async, client_of, engine_for, prepared, take_ticket
from app.generation.submit import submit
from app.http.json_body import JsonRoute
from app.parsing.formats.model_format import message_format
from app.prompts.render import Attached, chat_prompt
from app.storage.responses.conversation_turns import ConversationTurn
from batching import InvalidRequest, ModelInfo

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# The names that layers below have for fields, and those of this API.
_PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "truncate_prompt_tokens": "truncation",
}


@router.post("/v1/responses", response_model=ResponseObject, responses=EVENT_RESPONSES)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Respond to items of input; with `stream: true` as server-sent events."""
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        run, _ = await _begin(request, body, admitted)
    if body.background:
        return await run.detached(request, is_streamed=body.stream)
    return run.stream(request) if body.stream else await run.whole(request)


async def _begin(
    request: Request, body: ResponseRequest, admitted: AdmittedRequest
) -> tuple[ResponseRun, ResolvedRequest]:
    """Begin to generate a response, which has its turn in its conversation until it is stored.

    One without output adds nothing, so it needs no turn.
    """
    # A WebSocket is kept alive without comments.
    has_comments = body.stream and LATEST not in request.scope["state"]
    engine = await engine_for(request, body.model, is_streamed=has_comments)
    turn = None
    if body.conversation is not None and body.generates:
        turn = await OwnResponses(request).take_turn(body.conversation)
    with _own_names():
        resolved = await resolve(request, body)
        attached = await attached_to(request, engine.model, resolved.attachments)
        chat = await prepared(request, partial(resolved.prepare, engine.model, attached))
        job = await build_job_async(
            request,
            engine,
            [chat.prompt.token_ids],
            body.to_generation_params(),
            completion_id=new_item_id("resp"),
            output=chat.output,
            images=chat.prompt.images,
        )
        generation = await submit(engine, job, admitted)
    options = resolved.output_options(engine.grammars.token_bytes)
    writer = ResponseWriter(new_response(body, job), options)
    return ResponseRun(generation, writer, _save(request, resolved, turn)), resolved


@router.post("/v1/responses/compact", response_model=CompactedResponse)
async def compact_conversation(body: ResponseRequest, request: Request) -> Response:
    """Return the messages of the user, and a summary of the whole conversation that is sealed."""
    if body.conversation is not None:
        raise InvalidRequest("conversation", "this is not supported; its items can be the input")
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        given = [item for item in body.input if not isinstance(item, CompactionTrigger)]
        trigger = CompactionTrigger(type="compaction_trigger")
        asked = {"input": [*given, trigger], "store": False, "background": False, "stream": False}
        run, resolved = await _begin(request, body.model_copy(update=asked), admitted)
    return await run.whole(request, partial(compacted, resolved.items))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponseRequest, request: Request) -> InputTokens:
    """Count the tokens of the prompt that a request becomes."""
    with await take_ticket(request):
        engine = await engine_for(request, body.model)
        with _own_names():
            resolved = await resolve(request, body)
            attached = await attached_to(request, engine.model, resolved.attachments)
            count = partial(_num_tokens, engine.model, resolved, attached)
            num_tokens = await prepared(request, count)
        return InputTokens(input_tokens=num_tokens)


def _num_tokens(
    model: ModelInfo, resolved: ResolvedRequest, attached: Mapping[str, Attached]
) -> int:
    conversation, format_ = resolved.conversation(), message_format(model)
    return len(chat_prompt(model, conversation, format_, attached=attached).token_ids)


@contextmanager
def _own_names() -> Iterator[None]:
    """Give the fields in errors of the layers below the names that they have here."""
    try:
        yield
    except InvalidRequest as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


def _save(request: Request, resolved: ResolvedRequest, turn: ConversationTurn | None) -> Save:
    """Return what keeps a response, if the client wants that.

    A line of a batch has its response in a file: by default it does not displace stored ones.
    """
    body = resolved.body
    is_line = client_of(request).is_batch and "store" not in body.model_fields_set
    put = partial(OwnResponses(request).put, store=body.store and not is_line)
    if turn is None:
        return partial(put, input_items=partial(stored_input, resolved.items))
    # A response in the background is stored twice, with the same ids of its items.
    given = cache(partial(stored_input, resolved.items, resolved.num_before))
    return partial(put, input_items=given, turn=turn)
