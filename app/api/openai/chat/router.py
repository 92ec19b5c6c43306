"""`POST /v1/chat/completions`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio
from fastapi import APIRouter, Request, Response

from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.chat.response import ChatCompletion
from app.api.openai.chat.response_builder import ChatResponseBuilder
from app.api.response_builder import head, new_id
from app.api.schemas.errors import EVENT_RESPONSES
from app.api.serving import (
    admitted,
    check_choices,
    demands_of,
    engine_for,
    num_tokens_of,
    respond,
)
from app.generation.submit import GrammarSpec, generate, truncated
from app.http.json_body import JsonRoute
from app.parsing.message_parser import MessageParser
from app.parsing.reasoning import ReasoningParser, ends_in_thinking
from app.parsing.reasoning_grammar import after_reasoning
from app.parsing.tool_format import ToolFormat, thinking_markers, tool_format
from app.prompts.render import chat_prompt
from batching import ModelInfo

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=EVENT_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation; with `stream: true` as server-sent events."""
    check_choices(request, body)
    async with admitted(request, body) as place:
        engine = await engine_for(request, body.model)
        chat = await anyio.to_thread.run_sync(_prepare, engine.model, body)
        wanted = await demands_of(request, engine, body, grammar=chat.grammar)
        completion_id = new_id("chatcmpl")
        generation = await generate(
            engine,
            [chat.prompt],
            body,
            wanted,
            completion_id=completion_id,
            max_tokens=num_tokens_of(
                request, engine, body, [chat.prompt], body.num_requested_tokens
            ),
            place=place,
            parser=chat.parser,
            kept_token_ids=chat.kept_token_ids,
            is_blocking=chat.is_blocking,
        )
    reply = ChatResponseBuilder(
        head=head(completion_id, engine.model.model_id),
        include_usage=body.include_usage,
        include_reasoning=body.include_reasoning,
        token_bytes=engine.grammars.token_bytes if body.logprobs else None,
    )
    return await respond(request, generation, reply, stream=body.stream)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation's tokens, what its answers follow, and how they are read."""

    prompt: list[int]
    grammar: GrammarSpec | None
    parser: Callable[[], MessageParser]
    kept_token_ids: frozenset[int]
    is_blocking: bool


def _prepare(model: ModelInfo, body: ChatCompletionRequest) -> PreparedChat:
    tools = tool_format(model)
    rendered = chat_prompt(model, body, tools)
    thinking = thinking_markers(model)
    is_open = thinking is not None and ends_in_thinking(rendered.text, thinking[0].text)
    grammar = _grammar(body, tools)
    if grammar is not None and thinking is not None:
        text = after_reasoning(grammar.grammar, *thinking, is_open=is_open)
        grammar = GrammarSpec(text, grammar.param)
    calls = tools if body.tools and body.used_tool_choice != "none" else None

    def new_parser() -> MessageParser:
        reasoning = called = None
        if thinking is not None:
            reasoning = ReasoningParser(*(marker.text for marker in thinking), is_open=is_open)
        if calls is not None:
            called = calls.parser(body.tools, is_parallel=body.parallel_tool_calls)
        return MessageParser(reasoning, called)

    markers = [marker.text for marker in thinking or ()]
    markers += calls.markers if calls else ()
    return PreparedChat(
        truncated(model, rendered.token_ids, body),
        grammar,
        new_parser,
        _special_tokens(model, markers),
        calls is not None and calls.is_blocking,
    )


def _grammar(body: ChatCompletionRequest, tools: ToolFormat) -> GrammarSpec | None:
    if body.structured_outputs is not None:
        return GrammarSpec(body.structured_outputs.grammar(), "structured_outputs")
    if body.response_format is not None and (text := body.response_format.grammar()) is not None:
        return GrammarSpec(text, "response_format")
    choice = body.used_tool_choice
    if choice == "none" or not body.tools:
        return None
    text = tools.grammar(body.tools, choice, is_parallel=body.parallel_tool_calls)
    return None if text is None else GrammarSpec(text, "tools")


def _special_tokens(model: ModelInfo, texts: Iterable[str]) -> frozenset[int]:
    """Return the special tokens in texts that a parser looks for."""
    encode = model.tokenizer.encode
    token_ids = {i for text in texts for i in encode(text, add_special_tokens=False)}
    return frozenset(token_ids & set(model.tokenizer.all_special_ids))
