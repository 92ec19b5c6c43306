"""`cache_control`: what is retained of a prompt, and what usage says of it."""

from typing import Any, Final

import pytest

from app.api.anthropic.conversation import to_conversation
from app.api.anthropic.request import MessagesRequest
from app.prompts.chat import prepare_chat
from app.storage.seal import Sealer
from batching import ModelInfo, RetainedPrefix
from tests.support.rows import rows
from tests.support.speaker import END, MODEL_ID, VOCAB_SIZE, ByteTokenizer, Served, served

pytestmark = pytest.mark.anyio

MODEL: Final = ModelInfo(MODEL_ID, ByteTokenizer(), frozenset({END}), VOCAB_SIZE, 4096)
DOCUMENT: Final = "A long text about trees. " * 8
FIVE: Final = {"type": "ephemeral"}
HOUR: Final = {"type": "ephemeral", "ttl": "1h"}
TOOL: Final = {"name": "add", "input_schema": {"properties": {"x": {"type": "integer"}}}}


def text(value: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": control}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Return the tokens that were created, read and neither."""
    return (
        usage["cache_creation_input_tokens"],
        usage["cache_read_input_tokens"],
        usage["input_tokens"],
    )


def retained(**fields: Any) -> tuple[RetainedPrefix, ...]:
    """Return what is retained of a prompt, which has a token for each character."""
    body = MessagesRequest.model_validate(fields)
    return prepare_chat(MODEL, to_conversation(body, Sealer(b"a key"))).retained


def up_to(prompt: str, seconds: float = 300) -> RetainedPrefix:
    return RetainedPrefix(len(prompt), seconds)


WHOLE: Final = RetainedPrefix(None, 300)


@rows(
    ("fields", "expected"),
    [
        ({"messages": [user(text("Hi"))]}, ()),
        ({"messages": [user(text("Hi", FIVE))]}, (WHOLE,)),
        ({"messages": [user(text("Hi"))], "cache_control": FIVE}, (WHOLE,)),
        (
            {"messages": [user(text("One", FIVE), text("Two"))]},
            (up_to("user: One"),),
        ),
        (
            {"messages": [user(text("One", HOUR), text("Two", FIVE))]},
            (up_to("user: One", 3600), WHOLE),
        ),
        # The longer prefix has the longer time.
        ({"messages": [user(text("One", FIVE), text("Two", HOUR))]}, (RetainedPrefix(None, 3600),)),
        (
            {"messages": [user(text("One", FIVE), text("Two", FIVE), text("Three"))]},
            (up_to("user: One\nTwo"),),
        ),
        (
            {
                "system": [text("Be", HOUR), text("brief.", FIVE)],
                "messages": [user(text("Hi"))],
            },
            (up_to("system: Be", 3600), up_to("system: Be\nbrief.")),
        ),
        # Where the template writes tools is its own affair: before the first turn.
        (
            {
                "system": "Be.",
                "messages": [user(text("Hi"))],
                "tools": [TOOL | {"cache_control": FIVE}],
            },
            None,
        ),
        (
            {
                "messages": [
                    user(text("Hi", FIVE)),
                    {"role": "assistant", "content": [text("Yes?")]},
                    user(text("Go.")),
                ]
            },
            (up_to("user: Hi"),),
        ),
        # Text that looks like the marks by which the places are found.
        (
            {"messages": [user(text("\ufdd20\ufdd3", FIVE), text("\ufdd29\ufdd3"))]},
            None,
        ),
    ],
)
def test_what_is_retained(
    fields: dict[str, Any], expected: tuple[RetainedPrefix, ...] | None
) -> None:
    found = retained(**fields)
    if expected is not None:
        assert found == expected
    else:
        (prefix,) = found
        assert prefix.num_tokens


def test_a_call_is_a_part_of_what_is_cached_up_to_it() -> None:
    """Templates write calls behind the text of their turn."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}, "cache_control": FIVE}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}
    messages = [user(text("Hi")), {"role": "assistant", "content": [text("Well."), call]}]
    (prefix,) = retained(messages=[*messages, user(result)], tools=[TOOL])
    assert prefix.num_tokens is not None
    longer = prepare_chat(
        MODEL,
        to_conversation(
            MessagesRequest.model_validate(
                {"messages": [*messages, user(result)], "tools": [TOOL]}
            ),
            Sealer(b"a key"),
        ),
    ).prompt.text
    assert '"add"' in longer[: prefix.num_tokens].rpartition("Well.")[2]
    assert not longer[: prefix.num_tokens].endswith("3")


def test_a_text_like_a_mark_of_any_length_is_a_text() -> None:
    mark = f"\ufdd2{'9' * 5000}\ufdd3"
    assert retained(messages=[user(text("One", FIVE), text(mark))]) == (up_to("user: One"),)


def test_a_result_and_what_is_in_it_may_be_the_last() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
    for result, control in ((FIVE, None), (None, FIVE)):
        returned = {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [text("3", control)],
            "cache_control": result,
        }
        messages = [user(text("Hi")), {"role": "assistant", "content": [call]}, user(returned)]
        assert retained(messages=messages, tools=[TOOL]) == (WHOLE,)


class Trimming(ByteTokenizer):
    """Its template cuts white space off a content."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        turns = [turn | {"content": turn["content"].strip()} for turn in conversation]
        return super().apply_chat_template(turns, **kwargs)


async def ask(server: Served, *blocks: Any, **fields: Any) -> dict[str, Any]:
    response = await server.message(messages=[user(*blocks)], **fields)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


async def test_usage_says_what_was_created_and_what_was_read() -> None:
    prompt = f"user: {DOCUMENT}"
    async with served() as server:
        first = await ask(server, text(DOCUMENT, FIVE), text("Why?"))
        second = await ask(server, text(DOCUMENT, FIVE), text("How?"))
        other = await ask(server, text(DOCUMENT), text("When?"))
    rest = len("\nWhy?\nassistant:")
    assert counts(first) == (len(prompt), 0, rest)
    created, read, left = counts(second)
    assert created == len(prompt) - read
    assert (read > len(prompt) - 32, left) == (True, rest)
    assert other["cache_creation_input_tokens"] == 0
    assert first["cache_creation"] == {
        "ephemeral_5m_input_tokens": len(prompt),
        "ephemeral_1h_input_tokens": 0,
    }


async def test_usage_has_a_number_for_each_time() -> None:
    async with served() as server:
        usage = await ask(server, text("One" * 50, HOUR), text("Two" * 50, FIVE))
    whole = len(f"user: {'One' * 50}\n{'Two' * 50}\nassistant:")
    hour = len(f"user: {'One' * 50}")
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": whole - 1 - hour,
        "ephemeral_1h_input_tokens": hour,
    }
    # The last token is always computed: clients take 0 for none said.
    assert counts(usage) == (whole - 1, 0, 1)


async def test_a_stream_says_so_at_its_end() -> None:
    async with served() as server:
        response = await server.message(messages=[user(text(DOCUMENT, FIVE))], stream=True)
    start, end = (line for line in response.text.splitlines() if '"usage"' in line)
    whole = len(f"user: {DOCUMENT}\nassistant:")
    assert '"cache_creation":null' in start
    assert f'"input_tokens":{whole},"cache_creation_input_tokens":0' in start
    assert f'"input_tokens":1,"cache_creation_input_tokens":{whole - 1}' in end


async def test_a_template_that_trims_is_no_obstacle() -> None:
    async with served(tokenizer=Trimming()) as server:
        usage = await ask(server, text("One  ", FIVE), text("  Two  "))
    # The white space between the blocks is a part of the content.
    assert usage["cache_creation_input_tokens"] == len("user: One  ")


async def test_more_than_four_breakpoints_are_refused_as_by_anthropic() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [text("3", FIVE)],
        "cache_control": FIVE,
    }
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
    messages = [user(text("Hi")), {"role": "assistant", "content": [call]}, user(result)]
    fields = {"tools": [TOOL | {"cache_control": FIVE}], "cache_control": FIVE}
    async with served() as server:
        most = await server.message(messages=messages, **fields)
        more = await server.message(messages=messages, system=[text("Be.", FIVE)], **fields)
    assert most.status_code == 200
    assert more.status_code == 400
    assert more.json()["error"]["message"].startswith("cache_control: 5 blocks have it; 4 are")


@rows(
    ("control", "param"),
    [
        ({"type": "persistent"}, "type"),
        ({"type": "ephemeral", "ttl": "2h"}, "ttl"),
        ({}, "type"),
        ("ephemeral", "cache_control"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused(control: Any, param: str) -> None:
    async with served() as server:
        response = await server.message(messages=[user(text("Hi", control))])
    assert response.status_code == 400
    assert param in response.json()["error"]["message"]
