"""`POST /tokenize`, `/detokenize` and `/v1/chat/completions/render`: the tokens of a model."""

from functools import partial

from fastapi import APIRouter, Request

from app.api.chat_template import run_with_template
from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.logprobs import TokenBytes, token_name
from app.api.serving import engine_for, take_ticket
from app.api.vllm.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderedPrompt,
    TokenizeRequest,
    TokenizeResponse,
)
from app.http.json_body import JsonRoute
from app.parsing.formats.model_format import message_format
from app.prompts.render import chat_prompt, completion_prompt
from app.server_state import server_state
from batching import ModelInfo, check_token_ids

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Return the tokens of a text, or of a conversation."""
    await take_ticket(request)
    engine = await engine_for(request, body.model)
    tokenized = partial(_tokenized, body=body, token_bytes=engine.grammars.token_bytes)
    return await run_with_template(request, engine.model, body.chat_template, tokenized)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Return the text of tokens, special ones included."""
    await take_ticket(request)
    engine = await engine_for(request, body.model)
    check_token_ids(engine.model, "tokens", body.tokens)
    text = await server_state(request).threads.prompts.run(
        partial(engine.model.tokenizer.decode, body.tokens)
    )
    return DetokenizeResponse(prompt=text)


@router.post("/v1/chat/completions/render")
async def render_chat(body: ChatCompletionRequest, request: Request) -> RenderedPrompt:
    """Return the prompt that a chat request becomes, without answering it."""
    await take_ticket(request)
    engine = await engine_for(request, body.model)
    rendered = partial(_rendered, body=body)
    return await run_with_template(request, engine.model, body.chat_template, rendered)


def _tokenized(
    model: ModelInfo, body: TokenizeRequest, token_bytes: TokenBytes
) -> TokenizeResponse:
    tokens = _tokens(model, body)
    names = [token_name(token_bytes(token)) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=names
    )


def _tokens(model: ModelInfo, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        return completion_prompt(model, body.prompt, add_special_tokens=adds)
    chat = chat_prompt(model, body.conversation_of(body.messages), message_format(model))
    if not body.add_special_tokens:
        return chat.token_ids
    return completion_prompt(model, chat.text, add_special_tokens=True)


def _rendered(model: ModelInfo, body: ChatCompletionRequest) -> RenderedPrompt:
    prompt = chat_prompt(model, body.to_conversation(), message_format(model), body.truncation())
    return RenderedPrompt(
        prompt=prompt.text,
        count=len(prompt.token_ids),
        max_model_len=model.max_model_len,
        tokens=prompt.token_ids,
    )
