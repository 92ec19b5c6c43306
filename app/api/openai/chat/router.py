"""`POST /v1/chat/completions`."""

from collections.abc import Mapping
from functools import partial

from fastapi import APIRouter, Request, Response

from app.api.attachments import attached_to
from app.api.chat_template import run_with_template
from app.api.openai.chat.call_writer import CallWriter
from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.chat.response import ChatCompletion
from app.api.openai.chat.response_builder import ChatResponseBuilder
from app.api.openai.response_builder import common_fields, new_id, respond
from app.api.openai.schemas.queue_options import served_tier
from app.api.openai.schemas.sampling import check_num_choices
from app.api.openai.schemas.tool_calling.tools import custom_names
from app.api.schemas.errors import ERROR_RESPONSES, EVENT_RESPONSES
from app.api.serving import admit, build_job_async, engine_for
from app.generation.submit import submit
from app.http.json_body import JsonRoute
from app.parsing.tool_spec import NamedTool
from app.prompts.chat import PreparedChat, prepare_chat
from app.prompts.render import Attached
from app.server_state import server_state
from batching import ModelInfo

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=EVENT_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Complete a conversation; with `stream: true` as server-sent events."""
    check_num_choices(body, server_state(request).settings.max_choices)
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        engine = await engine_for(request, body.model, is_streamed=body.stream)
        attached = await attached_to(request, engine.model, body.attachments)
        prepare = partial(_prepared, body=body, attached=attached)
        chat = await run_with_template(request, engine.model, body.chat_template, prepare)
        job = await build_job_async(
            request,
            engine,
            [chat.prompt.token_ids],
            body.to_generation_params(),
            completion_id=new_id("chatcmpl"),
            output=chat.output,
            images=chat.prompt.images,
        )
        generation = await submit(engine, job, admitted)
    builder = ChatResponseBuilder(
        common_fields=common_fields(job.completion_id, engine.model.model_id)
        | {"service_tier": served_tier(body.service_tier)},
        options=body,
        prompt=chat.prompt.token_ids,
        include_reasoning=body.shows_reasoning,
        names_tool=isinstance(body.effective_tool_choice, NamedTool),
        include_logprobs=body.logprobs,
        token_bytes=engine.grammars.token_bytes,
        calls=CallWriter(custom_names(body.tools)),
    )
    return await respond(request, generation, builder, stream=body.stream)


def _prepared(
    model: ModelInfo, body: ChatCompletionRequest, attached: Mapping[str, Attached]
) -> PreparedChat:
    return prepare_chat(
        model,
        body.to_conversation(),
        grammar=body.content_grammar(),
        truncation=body.truncation(),
        attached=attached,
    )
