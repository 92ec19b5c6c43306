"""`POST /tokenize`, `/detokenize` and `/v1/chat/completions/render`: the tokens of a model."""

import anyio
from fastapi import APIRouter, Request

from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.logprobs import token_name
from app.api.serving import admit_without_body, engine_for
from app.api.vllm.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderedPrompt,
    TokenizeRequest,
    TokenizeResponse,
)
from app.http.json_body import JsonRoute
from app.parsing.tool_format import tool_format
from app.prompts.render import chat_prompt, completion_prompt
from batching import EngineThread, ModelInfo, check_token_ids

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", response_model_exclude_unset=True)
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Return the tokens of a text."""
    with admit_without_body(request):
        engine = await engine_for(request, body.model)
        return await anyio.to_thread.run_sync(_tokenized, engine, body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Return the text of tokens, special ones included."""
    with admit_without_body(request):
        engine = await engine_for(request, body.model)
        check_token_ids(engine.model, "tokens", body.tokens)
        text = await anyio.to_thread.run_sync(engine.model.tokenizer.decode, body.tokens)
        return DetokenizeResponse(prompt=text)


@router.post("/v1/chat/completions/render")
async def render_chat(body: ChatCompletionRequest, request: Request) -> RenderedPrompt:
    """Return the prompt that a chat request becomes, without answering it."""
    with admit_without_body(request):
        engine = await engine_for(request, body.model)
        return await anyio.to_thread.run_sync(_rendered, engine.model, body)


def _tokenized(engine: EngineThread, body: TokenizeRequest) -> TokenizeResponse:
    tokens = completion_prompt(
        engine.model, body.prompt, add_special_tokens=body.add_special_tokens
    )
    response = TokenizeResponse(
        count=len(tokens), max_model_len=engine.model.max_model_len, tokens=tokens
    )
    if body.return_token_strs:
        response.token_strs = [token_name(engine.grammars.token_bytes(token)) for token in tokens]
    return response


def _rendered(model: ModelInfo, body: ChatCompletionRequest) -> RenderedPrompt:
    prompt = chat_prompt(model, body.to_conversation(), tool_format(model), body.truncation())
    return RenderedPrompt(
        prompt=prompt.text,
        count=len(prompt.token_ids),
        max_model_len=model.max_model_len,
        tokens=prompt.token_ids,
    )
