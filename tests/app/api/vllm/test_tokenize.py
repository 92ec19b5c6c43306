"""What a model sees: tokens of texts, texts of tokens, and rendered chats."""

from typing import Any

import pytest

from tests.support.speaker import END, ByteTokenizer, served

pytestmark = pytest.mark.anyio


async def test_a_text_and_its_tokens() -> None:
    async with served() as server:
        plain = (await server.post("/tokenize", {"prompt": "Hé"})).json()
        named = (await server.post("/tokenize", {"prompt": "Hi", "return_token_strs": True})).json()
        back = (await server.post("/detokenize", {"tokens": [72, 105, END]})).json()
    assert plain == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": [72, 195, 169],
        "token_strs": None,
    }
    assert named["token_strs"] == ["H", "i"]
    assert back == {"prompt": "Hi<end>"}


class Beginning(ByteTokenizer):
    """Writes a token of its own before a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [END] * add_special_tokens + super().encode(text)


async def test_the_special_tokens_of_a_text_can_be_left_out() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    async with served(tokenizer=Beginning()) as server:
        tokens = [
            (await server.post("/tokenize", body)).json()["tokens"][:2]
            for body in (
                {"prompt": "Hi"},
                {"prompt": "Hi", "add_special_tokens": False},
                {"messages": turns},
                {"messages": turns, "add_special_tokens": True},
            )
        ]
    assert tokens == [[END, ord("H")], list(b"Hi"), list(b"us"), [END, ord("u")]]


async def test_a_conversation_and_its_tokens() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Y"}]
    tool = {"type": "function", "function": {"name": "add"}}
    async with served() as server:
        plain = (await server.post("/tokenize", {"messages": turns})).json()
        ended = await server.post(
            "/tokenize", {"messages": turns, "add_generation_prompt": False, "tools": [tool]}
        )
        going_on = (
            await server.post("/tokenize", {"messages": turns, "continue_final_message": True})
        ).json()
    assert bytes(plain["tokens"]).decode() == "user: Hi\nassistant: Y\nassistant:"
    assert plain["count"] == len(plain["tokens"])
    text = bytes(ended.json()["tokens"]).decode()
    assert text.startswith("system: # Tools")
    assert text.endswith("assistant: Y\n")
    assert bytes(going_on["tokens"]).decode().endswith("assistant: Y")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template"),
    ],
)
async def test_a_text_or_a_conversation_is_asked_for(body: dict[str, Any], param: str) -> None:
    async with served() as server:
        response = await server.post("/tokenize", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


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
    assert end["tokens"] == end["token_ids"] == list(b"nt:")
