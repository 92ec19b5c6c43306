"""`POST /tokenize`, `/detokenize` and `/v1/chat/completions/render`: the tokens of a model."""

from collections.abc import Mapping
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from app.api.attachments import attached_to
from app.api.chat_template import run_with_template
from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.logprobs import TokenBytes, token_name
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import NUMBER_BYTES, engine_for, prepared, take_ticket, written
from app.api.vllm.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderedPrompt,
    TokenizeRequest,
    TokenizeResponse,
)
from app.http.json_body import JsonRoute
from app.parsing.formats.model_format import message_format
from app.prompts.render import Attached, chat_prompt, completion_prompt
from batching import InvalidRequest, ModelInfo, check_token_ids

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of a text, or of a conversation."""
    with await take_ticket(request):
        engine = await engine_for(request, body.model)
        attached = await attached_to(request, engine.model, body.attachments_of(body.messages))
        token_bytes = engine.grammars.token_bytes
        tokenized = partial(_tokenized, body=body, attached=attached, token_bytes=token_bytes)
        answer = await run_with_template(request, engine.model, body.chat_template, tokenized)
        return await _response(request, answer, NUMBER_BYTES * len(answer.tokens))


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    with await take_ticket(request):
        engine = await engine_for(request, body.model)
        check_token_ids(engine.model, "tokens", body.tokens)
        decode = partial(engine.model.tokenizer.decode, body.tokens)
        text = await prepared(request, decode)
        return await _response(request, DetokenizeResponse(prompt=text), len(text))


@router.post("/v1/chat/completions/render", response_model=RenderedPrompt)
async def render_chat(body: ChatCompletionRequest, request: Request) -> Response:
    """Return the prompt that a chat request becomes, without answering it."""
    with await take_ticket(request):
        engine = await engine_for(request, body.model)
        attached = await attached_to(request, engine.model, body.attachments)
        rendered = partial(_rendered, body=body, attached=attached)
        answer = await run_with_template(request, engine.model, body.chat_template, rendered)
        num_bytes = len(answer.prompt) + 2 * NUMBER_BYTES * len(answer.tokens)
        return await _response(request, answer, num_bytes)


async def _response(request: Request, answer: BaseModel, num_bytes: int) -> Response:
    body = await written(request, answer.model_dump_json, num_bytes)
    return Response(body, media_type="application/json")


def _tokenized(
    model: ModelInfo,
    body: TokenizeRequest,
    attached: Mapping[str, Attached],
    token_bytes: TokenBytes,
) -> TokenizeResponse:
    tokens = _tokens(model, body, attached)
    names = [token_name(token_bytes(token)) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=names
    )


def _tokens(model: ModelInfo, body: TokenizeRequest, attached: Mapping[str, Attached]) -> list[int]:
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        return completion_prompt(model, body.prompt, add_special_tokens=adds)
    conversation = body.conversation_of(body.messages)
    chat = chat_prompt(model, conversation, message_format(model), attached=attached)
    if not body.add_special_tokens:
        return chat.token_ids
    if chat.images:
        raise InvalidRequest("add_special_tokens", "it cannot be combined with images")
    return completion_prompt(model, chat.text, add_special_tokens=True)


def _rendered(
    model: ModelInfo, body: ChatCompletionRequest, attached: Mapping[str, Attached]
) -> RenderedPrompt:
    conversation, format_ = body.to_conversation(), message_format(model)
    prompt = chat_prompt(model, conversation, format_, body.truncation(), attached)
    return RenderedPrompt(
        prompt=prompt.text,
        count=len(prompt.token_ids),
        max_model_len=model.max_model_len,
        token_ids=prompt.token_ids,
        tokens=prompt.token_ids,
    )
