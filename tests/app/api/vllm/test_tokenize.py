"""What a model sees: tokens of texts, texts of tokens, and rendered chats."""

import pytest

from tests.support.speaker import END, served

pytestmark = pytest.mark.anyio


async def test_a_text_and_its_tokens() -> None:
    async with served() as server:
        plain = (await server.post("/tokenize", {"prompt": "Hé"})).json()
        named = (await server.post("/tokenize", {"prompt": "Hi", "return_token_strs": True})).json()
        back = (await server.post("/detokenize", {"tokens": [72, 105, END]})).json()
    assert plain == {"count": 3, "max_model_len": 2048, "tokens": [72, 195, 169]}
    assert named["token_strs"] == ["H", "i"]
    assert back == {"prompt": "Hi<end>"}


async def test_tokens_that_are_none_are_rejected() -> None:
    async with served() as server:
        response = await server.post("/detokenize", {"tokens": [END + 1]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


async def test_a_chat_is_rendered_as_it_would_be_answered() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    async with served() as server:
        whole = (await server.post("/v1/chat/completions/render", body)).json()
        end = (
            await server.post("/v1/chat/completions/render", body | {"truncate_prompt_tokens": 3})
        ).json()
        answer = (await server.chat("Hi")).json()
    assert whole["prompt"] == "user: Hi\nassistant:"
    assert bytes(whole["tokens"]).decode() == whole["prompt"]
    assert whole["count"] == answer["usage"]["prompt_tokens"]
    assert end["tokens"] == list(b"nt:")
