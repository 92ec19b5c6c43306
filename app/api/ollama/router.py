"""`POST /api/chat` and `/api/generate`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fastapi import Request, Response

from app.admission.admitted_request import AdmittedRequest
from app.api.attachments import attached_to
from app.api.models.cards import capabilities
from app.api.ollama.names import known_name
from app.api.ollama.request import AnswerRequest, ChatRequest, GenerateRequest
from app.api.ollama.response import LINE_RESPONSES, ChatAnswer, GenerateAnswer
from app.api.ollama.response_builder import AnswerWriter, answer_lines, error_line, lines_form
from app.api.ollama.route import new_router
from app.api.openai.response_builder import new_id
from app.api.serving import (
    admit,
    build_job_async,
    check_admin,
    client_of,
    engine_for,
    json_response,
    prepared,
)
from app.api.sse import LINES_TYPE, LineStream
from app.generation.generation import Generation
from app.generation.submit import submit
from app.parsing.output_format import OutputFormat
from app.prompts.chat import PreparedChat, prepare_chat
from app.prompts.fill_in import fill_in_prompt, fill_in_tokens
from app.prompts.render import Attached, ChatPrompt, completion_prompt
from app.server_state import server_state
from batching import AsyncEngine, InvalidRequest, ModelInfo, Priority

# LiteLLM sends no content type.
router = new_router()


@router.post("/api/chat", response_model=ChatAnswer, responses=LINE_RESPONSES)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Complete a conversation; unless `stream` is false as lines of JSON."""
    return await _respond(body, request)


@router.post("/api/generate", response_model=GenerateAnswer, responses=LINE_RESPONSES)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Respond to a prompt; unless `stream` is false as lines of JSON."""
    return await _respond(body, request)


async def _respond(body: AnswerRequest, request: Request) -> Response:
    async with admit(request, priority=Priority.NORMAL, time_limit=None) as admitted:
        name = known_name(server_state(request).manager, body.model)
        writer = AnswerWriter(
            model=body.model, is_chat=isinstance(body, ChatRequest), deadline=admitted.deadline
        )
        if body.is_empty and body.keep_alive == 0:
            return _unloaded(request, name, writer, is_streamed=body.stream)
        engine = await engine_for(
            request,
            name,
            is_streamed=body.stream,
            form=lines_form(writer),
            keep_alive=kept(request, body.keep_alive),
        )
        writer.load_time = admitted.deadline.elapsed()
        if body.is_empty:
            return _without_output(writer.without_output("load"), is_streamed=body.stream)
        generation = await _generation(request, body, engine, admitted)
    if body.logprobs:
        writer.token_bytes = engine.grammars.token_bytes
    if body.stream:
        return LineStream(answer_lines(generation, writer), writer.empty_line, error_line)
    return await json_response(request, generation, writer.whole)


def kept(request: Request, keep_alive: float | None) -> float | None:
    """Return how long a request keeps its model; where there are keys, only an admin's says so."""
    return keep_alive if client_of(request).is_admin else None


def _unloaded(request: Request, name: str, writer: AnswerWriter, *, is_streamed: bool) -> Response:
    check_admin(request)
    server_state(request).manager.unload(name)
    return _without_output(writer.without_output("unload"), is_streamed=is_streamed)


def _without_output(line: bytes, *, is_streamed: bool) -> Response:
    return Response(line, media_type=LINES_TYPE if is_streamed else "application/json")


async def _generation(
    request: Request, body: AnswerRequest, engine: AsyncEngine, admitted: AdmittedRequest
) -> Generation:
    attached = await attached_to(request, engine.model, body.attachments)
    made = await prepared(request, partial(_prepared, engine.model, body, attached))
    tokens = (
        engine.model.derived(fill_in_tokens)
        if isinstance(body, GenerateRequest) and body.suffix
        else None
    )
    params = body.params()
    if tokens is not None:
        params = replace(params, stop_token_ids=tokens.ends)
    job = await build_job_async(
        request,
        engine,
        [made.prompt.token_ids],
        params,
        completion_id=new_id("ollama"),
        output=made.output,
        images=made.prompt.images,
    )
    return await submit(engine, job, admitted)


def _prepared(
    model: ModelInfo, body: AnswerRequest, attached: Mapping[str, Attached]
) -> PreparedChat:
    if body.think and "thinking" not in model.derived(capabilities):
        raise InvalidRequest("think", f"the model '{model.model_id}' does not think")
    if isinstance(body, GenerateRequest) and body.suffix:
        filled = fill_in_prompt(model, "suffix", body.prompt, body.suffix).token_ids
        made = ChatPrompt(body.prompt, filled, body.prompt)
        return PreparedChat(made, OutputFormat(grammar=body.grammar()))
    is_text = isinstance(body, GenerateRequest) and (
        body.raw or not (model.tokenizer.has_chat_template or body.system or body.images)
    )
    if is_text and isinstance(body, GenerateRequest):
        token_ids = completion_prompt(model, body.prompt, add_special_tokens=True)
        prompt = ChatPrompt(body.prompt, token_ids, body.prompt)
        return PreparedChat(prompt, OutputFormat(grammar=body.grammar()))
    return prepare_chat(model, body.to_conversation(), grammar=body.grammar(), attached=attached)
