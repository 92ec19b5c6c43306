"""A request that makes something raise ends with an error, and no other request notices."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
from jinja2 import TemplateRuntimeError, UndefinedError
from jinja2.exceptions import SecurityError

from app.parsing.tools.tool_parser import ToolCallParser
from tests.support.speaker import ByteTokenizer, Served, served

pytestmark = pytest.mark.anyio

SECRET: Final = "the secret of the prompt"
POISON: Final = "poison"
TOOLS: Final = [{"type": "function", "function": {"name": "add"}}]
CUSTOM: Final = {"name": "add", "input_schema": {}}
FAILURES: Final[list[Exception]] = [
    RecursionError(SECRET),
    OverflowError(SECRET),
    ZeroDivisionError(SECRET),
    KeyError(SECRET),
    AttributeError(SECRET),
    MemoryError(SECRET),
    UnicodeError(SECRET),
    TypeError(SECRET),
    SecurityError(SECRET),
    UndefinedError(SECRET),
    TemplateRuntimeError(SECRET),
]


class Poisoned(ByteTokenizer):
    """Raises where a conversation has a poison."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        if any(POISON in message["content"] for message in conversation):
            raise self.failure
        return super().apply_chat_template(conversation, **kwargs)


class Undecodable(ByteTokenizer):
    """Cannot decode the first token of the completion of a poisoned request."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if ord("!") in token_ids:
            raise ValueError(SECRET)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


async def check_others_are_served(server: Served) -> None:
    answer = (await server.chat("Hi", max_tokens=3)).json()
    assert answer["choices"][0]["message"]["content"] == "Hel"
    assert await server.num_unfinished() == 0
    assert server.service.admission.num_requests == 0


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_whatever_a_template_raises_is_reported_without_the_prompt(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with served(tokenizer=Poisoned(failure)) as server:
        rejected = await server.chat(POISON)
        streamed = await server.chat(POISON, stream=True)
        asked = await server.chat(POISON, chat_template_kwargs={"tone": "rude"})
        message = await server.message(POISON)
        responded = await server.post("/v1/responses", {"input": POISON})
        await check_others_are_served(server)
    assert message.status_code == 400
    assert message.json()["error"]["message"].startswith("messages: the model's chat template")
    for response, param in (
        (rejected, "messages"),
        (streamed, "messages"),
        (asked, "chat_template_kwargs"),
        (responded, "input"),
    ):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert type(failure).__name__ in error["message"]
        assert SECRET not in response.text
    assert SECRET not in message.text + caplog.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_cannot_be_decoded_ends_its_own_request(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
    async with served(tokenizer=Undecodable()) as server:
        whole = await server.post(path, body)
        streamed = await server.post(path, body | {"stream": True})
        await check_others_are_served(server)
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    assert streamed.status_code == 200
    *_, last, done = streamed.text.split("\n\n")[:-1]
    assert '"type": "server_error"' in last
    assert done == "data: [DONE]"
    assert SECRET not in whole.text + streamed.text + caplog.text


async def test_what_cannot_be_decoded_ends_its_own_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(tokenizer=Undecodable()) as server:
        whole = await server.message()
        streamed = await server.message(stream=True)
        await check_others_are_served(server)
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "api_error"
    *_, last = streamed.text.split("\n\n")[:-1]
    assert last.startswith("event: error\n")
    assert '"type": "api_error"' in last
    assert SECRET not in whole.text + streamed.text + caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parser_that_fails_ends_its_own_request(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(parser: ToolCallParser, text: str) -> None:
        raise IndexError(text)

    monkeypatch.setattr(ToolCallParser, "add", fail)
    async with served() as server:
        response = await server.chat("Hi", tools=TOOLS, stream=stream)
        message = await server.message("Hi", tools=[CUSTOM], stream=stream)
        await check_others_are_served(server)
    assert response.status_code == message.status_code == 500
    assert '"type": "server_error"' in response.text
    assert '"type": "api_error"' in message.text
