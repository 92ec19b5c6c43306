"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Query, Request, Response

from app.api.anthropic.conversation import attachments, to_conversation
from app.api.anthropic.request import CountTokensRequest, MessagesRequest
from app.api.anthropic.response import (
    ERROR_RESPONSES,
    BetaMessage,
    BetaTokenCount,
    Message,
    TokenCount,
)
from app.api.anthropic.response_builder import MessageBuilder, message_events, new_ping
from app.api.attachments import attached_to
from app.api.schemas.errors import EVENT_RESPONSES
from app.api.serving import admit, build_job_async, engine_for, json_response, prepared, take_ticket
from app.api.sse import EventStream
from app.generation.submit import submit
from app.http.json_body import JsonRoute
from app.parsing.formats.model_format import message_format
from app.prompts.chat import PreparedChat, prepare_chat
from app.prompts.render import Attached, chat_prompt
from app.server_state import server_state
from app.storage.seal import Sealer
from batching import ModelInfo, Priority

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/v1/messages", response_model=BetaMessage | Message, responses=EVENT_RESPONSES)
async def create_message(
    body: MessagesRequest, request: Request, beta: Annotated[bool, Query()] = False
) -> Response:
    """Complete a conversation; with `stream: true` as server-sent events."""
    sealer = server_state(request).sealer
    async with admit(request, priority=Priority.NORMAL, time_limit=None) as admitted:
        engine = await engine_for(request, body.model, is_streamed=body.stream)
        attached = await attached_to(request, engine.model, attachments(body.messages))
        prepare = partial(_prepared, engine.model, body, sealer, attached)
        chat = await prepared(request, prepare)
        job = await build_job_async(
            request,
            engine,
            [chat.prompt.token_ids],
            body.to_generation_params(chat.retained),
            completion_id=f"msg_{uuid4().hex}",
            output=chat.output,
            images=chat.prompt.images,
        )
        generation = await submit(engine, job, admitted)
    builder = MessageBuilder(
        message_id=job.completion_id,
        model_id=engine.model.model_id,
        request_id=admitted.request_id,
        sealer=sealer,
        omits_thinking=body.omits_thinking,
        is_beta=beta,
    )
    if body.stream:
        return EventStream(message_events(generation, builder), new_ping, builder.error_event)
    return await json_response(request, generation, builder.full_json)


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    body: CountTokensRequest, request: Request, beta: Annotated[bool, Query()] = False
) -> BetaTokenCount | TokenCount:
    """Count the tokens of the prompt that a request becomes."""
    sealer = server_state(request).sealer
    with await take_ticket(request):
        engine = await engine_for(request, body.model)
        attached = await attached_to(request, engine.model, attachments(body.messages))
        count = partial(_num_tokens, engine.model, body, sealer, attached)
        kind = BetaTokenCount if beta else TokenCount
        return kind(input_tokens=await prepared(request, count))


# Claude Code looks whether the server can be reached.
@router.head("/", include_in_schema=False)
@router.head("/api/hello", include_in_schema=False)
async def hello() -> Response:
    return Response()


def _prepared(
    model: ModelInfo, body: MessagesRequest, sealer: Sealer, attached: Mapping[str, Attached]
) -> PreparedChat:
    conversation = to_conversation(body, sealer)
    return prepare_chat(model, conversation, grammar=body.content_grammar(), attached=attached)


def _num_tokens(
    model: ModelInfo, body: CountTokensRequest, sealer: Sealer, attached: Mapping[str, Attached]
) -> int:
    conversation, format_ = to_conversation(body, sealer), message_format(model)
    prompt = chat_prompt(model, conversation, format_, attached=attached)
    return len(prompt.token_ids)
