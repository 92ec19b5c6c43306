"""What a response has besides its text, if the request asks for it."""

from typing import Any

import pytest

from tests.support.chunks import chunks
from tests.support.fakes import expected_logprobs
from tests.support.speaker import END, served

pytestmark = pytest.mark.anyio

PROMPT = list(b"user: Hi\nassistant:")


def choices_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for part in parts for choice in part["choices"]]


async def test_the_token_ids_of_prompt_and_output_are_returned() -> None:
    async with served(b"ab") as server:
        chat = (await server.chat(return_token_ids=True, n=2)).json()
        text = (await server.complete(["x", "yz"], return_token_ids=True)).json()
        without = (await server.chat()).json()
    assert chat["prompt_token_ids"] == PROMPT
    assert [choice["token_ids"] for choice in chat["choices"]] == [[97, 98, END]] * 2
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == [[120], [121, 122]]
    assert [choice["token_ids"] for choice in text["choices"]] == [[97, 98, END]] * 2
    assert "prompt_token_ids" not in without
    assert "token_ids" not in without["choices"][0]


async def test_token_ids_are_streamed_with_their_text() -> None:
    async with served(b"ab") as server:
        chat = chunks(await server.chat(return_token_ids=True, stream=True))
        text = chunks(await server.complete("x", return_token_ids=True, stream=True, echo=True))
    assert [part.get("prompt_token_ids") for part in chat] == [PROMPT, *[None] * (len(chat) - 1)]
    for parts in (chat, text):
        streamed = [i for choice in choices_of(parts) for i in choice.get("token_ids", [])]
        assert streamed == [97, 98, END]
    first, *others = choices_of(text)
    assert first["prompt_token_ids"] == [120]
    assert not any("prompt_token_ids" in choice for choice in others)


async def test_token_ids_end_where_a_stop_string_does() -> None:
    async with served(b"abcd") as server:
        chat = (await server.chat(return_token_ids=True, stop=["c"])).json()
    assert chat["choices"][0]["token_ids"] == [97, 98, 99]


@pytest.mark.parametrize("fields", [{}, {"stop": ["c"]}], ids=["end token", "stop string"])
async def test_each_token_id_has_its_log_probability(fields: dict[str, Any]) -> None:
    async with served(b"abcd") as server:
        asked = {"return_token_ids": True, **fields}
        chat = (await server.chat(logprobs=True, top_logprobs=1, **asked)).json()
        text = (await server.complete("x", logprobs=1, **asked)).json()
        plain = (await server.complete("x", logprobs=1, **fields)).json()
    (choice,) = chat["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    (choice,) = text["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    (choice,) = plain["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_tokens_are_named_by_their_ids_on_request() -> None:
    fields = {"return_tokens_as_token_ids": True}
    async with served(b"a") as server:
        chat = (await server.chat(logprobs=True, top_logprobs=1, **fields)).json()
        text = (await server.complete("x", logprobs=1, echo=True, max_tokens=1, **fields)).json()
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert token["token"] == "token_id:97"
    assert token["bytes"] == [97]
    assert token["top_logprobs"][0]["token"] == "token_id:33"
    logprobs = text["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:120", "token_id:97"]
    assert logprobs["top_logprobs"][1].keys() == {"token_id:97", "token_id:33"}


async def test_the_log_probabilities_of_a_prompt_are_vllms() -> None:
    async with served(b"a") as server:
        chat = (await server.chat(prompt_logprobs=1)).json()
        text = (await server.complete(["xyz", "x"], prompt_logprobs=0)).json()
        both = (await server.complete("xyz", prompt_logprobs=2, logprobs=1, echo=True)).json()
        streamed = (await server.chat(prompt_logprobs=1, stream=True)).json()
    first, second, *_ = chat["prompt_logprobs"]
    assert len(chat["prompt_logprobs"]) == len(PROMPT)
    assert first is None
    expected = expected_logprobs(PROMPT[:1], 1)
    assert second == {
        "115": {"logprob": expected.logprob, "rank": None, "decoded_token": "s"},
        "33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"},
    }
    assert [len(choice["prompt_logprobs"]) for choice in text["choices"]] == [3, 1]
    assert text["choices"][0]["prompt_logprobs"][1].keys() == {"121"}
    (choice,) = both["choices"]
    assert choice["prompt_logprobs"][1].keys() == {"121", "33", "34"}
    assert choice["logprobs"]["top_logprobs"][1].keys() == {"y", "!"}
    assert streamed["error"]["param"] == "prompt_logprobs"


async def test_log_probabilities_of_named_tokens_replace_the_most_probable_ones() -> None:
    async with served(b"a") as server:
        chat = (await server.chat(logprobs=True, logprob_token_ids=[72, 73, 72])).json()
        text = (await server.complete("x", logprobs=1, logprob_token_ids=[72])).json()
        wrong = (await server.chat(logprobs=True, logprob_token_ids=[END + 1])).json()
        missing = [
            (await server.chat(logprob_token_ids=[72])).json(),
            (await server.complete(logprob_token_ids=[72])).json(),
        ]
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in token["top_logprobs"]] == ["a", "H", "I"]
    assert token["top_logprobs"][0]["logprob"] == token["logprob"]
    assert text["choices"][0]["logprobs"]["top_logprobs"][0].keys() == {"a", "H"}
    for answer in (wrong, *missing):
        assert answer["error"]["param"] == "logprob_token_ids"


async def test_every_chunk_has_the_usage_so_far_on_request() -> None:
    options = {"continuous_usage_stats": True}
    async with served(b"abc") as server:
        chat = chunks(await server.chat(stream=True, stream_options=options))
        text = chunks(await server.complete(stream=True, stream_options=options))
        without = await server.chat(stream=True, stream_options=options | {"include_usage": False})
    for parts in (chat, text):
        counts = [part["usage"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts)
        assert counts[-2:] == [4, 4]
        assert parts[-1]["choices"] == []
    assert chat[0]["usage"]["completion_tokens"] == 0
    assert chat[0]["usage"]["prompt_tokens"] == len(PROMPT)
    assert not any("usage" in part for part in chunks(without))


async def test_every_chunk_has_timings_on_request() -> None:
    async with served(b"abc") as server:
        parts = chunks(await server.chat(stream=True, timings_per_token=True))
        whole = (await server.chat(timings_per_token=True)).json()
    first, *others = parts
    assert "timings" not in first
    assert [part["timings"]["predicted_n"] for part in others] == [1, 2, 3, 4, 4]
    assert others[-1]["choices"] == []
    assert "usage" not in others[0]
    assert whole["timings"]["predicted_n"] == 4


async def test_no_tokens_after_an_echo_are_a_prompt_that_is_scored() -> None:
    async with served(b"abc") as server:
        fields = {"max_tokens": 0, "echo": True, "logprobs": 1}
        whole = (await server.complete("xyz", return_token_ids=True, **fields)).json()
        parts = chunks(await server.complete("xyz", stream=True, return_token_ids=True, **fields))
        refused = [
            (await server.complete("xyz", max_tokens=0)).json(),
            (await server.complete("xyz", max_tokens=0, echo=True, min_tokens=1)).json(),
        ]
        cut = (
            await server.complete("x" * 3000, max_tokens=0, echo=True, truncate_prompt_tokens=-1)
        ).json()
    (choice,) = whole["choices"]
    assert choice["text"] == "xyz"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["x", "y", "z"]
    assert choice["logprobs"]["token_logprobs"][1] == expected_logprobs([120]).logprob
    assert choice["token_ids"] == []
    assert whole["usage"]["completion_tokens"] == 0
    assert [c["text"] for c in choices_of(parts)] == ["xyz", ""]
    assert choices_of(parts)[0]["prompt_token_ids"] == [120, 121, 122]
    assert [answer["error"]["param"] for answer in refused] == ["max_tokens", "min_tokens"]
    assert cut["usage"]["prompt_tokens"] == 2047
