"""Several answers to one prompt, or to several; and the log probabilities of their tokens."""

from typing import Any

import pytest

from app.generation.generation import PrefillProgress
from batching.steps.sequences import SequenceState
from tests.support.chunks import chunks
from tests.support.fakes import expected_logprobs
from tests.support.speaker import END, Speaker, served

pytestmark = pytest.mark.anyio


class Variants(Speaker):
    """Says its bytes to the first request, and to the next ones each a letter less of them."""

    def _choose(self, sequence: SequenceState, prefix: list[int]) -> int:
        assert self._answer is not None
        place = len(prefix) - sequence.num_prompt_tokens + sequence.sequence_id % 3
        return self._answer[place] if place < len(self._answer) else END


def text_by_index(parts: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for part in parts:
        for choice in part["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + said
    return texts


async def test_n_choices_are_sent_in_their_order() -> None:
    async with served(b"abc", runner=Variants) as server:
        answer = (await server.chat("Hi", n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    said = [choice["message"]["content"] for choice in answer["choices"]]
    assert said == ["abc", "bc", "c"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len("user: Hi\nassistant:")
    assert usage["completion_tokens"] == 4 + 3 + 2


async def test_each_answer_of_a_stream_begins_with_the_role_and_ends_with_a_reason() -> None:
    async with served(b"abc", runner=Variants) as server:
        response = await server.chat("Hi", n=3, stream=True)
    parts = chunks(response)
    assert text_by_index(parts) == {0: "abc", 1: "bc", 2: "c"}
    for index in range(3):
        mine = [c for part in parts for c in part["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


async def test_a_stop_string_in_one_answer_ends_only_that_one() -> None:
    async with served(b"abcd", runner=Variants) as server:
        answer = (await server.chat("Hi", n=3, stop=["bc"])).json()
        num_unfinished = await server.num_unfinished()
    assert [c["message"]["content"] for c in answer["choices"]] == ["a", "", "cd"]
    assert num_unfinished == 0


async def test_more_choices_than_the_limit_are_rejected() -> None:
    async with served() as server:
        chat, completion = (
            (await server.chat(n=17)).json(),
            (await server.complete(n=2, best_of=17)).json(),
        )
    assert chat["error"]["param"] == "n"
    assert chat["error"]["message"] == "at most 16 choices of a prompt are allowed"
    assert completion["error"]["param"] == "best_of"


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_in_their_order(stream: bool) -> None:
    async with served(b"abc", runner=Variants) as server:
        response = await server.complete(["Hi", [72]], n=2, stream=stream)
    if stream:
        texts = text_by_index(chunks(response))
    else:
        texts = {c["index"]: c["text"] for c in response.json()["choices"]}
        assert response.json()["usage"]["prompt_tokens"] == 3
    assert texts == {0: "abc", 1: "bc", 2: "c", 3: "abc"}


async def test_the_best_of_several_choices_has_the_most_probable_tokens() -> None:
    """On average, the one that ends it included: else to say nothing would be best."""
    async with served(b"abc", runner=Variants) as server:
        one = (await server.complete("Hi", best_of=3)).json()
        two = (await server.complete("Hi", n=2, best_of=3, logprobs=0)).json()
        streamed = await server.complete("Hi", best_of=3, stream=True)
    prompt = list(b"Hi")
    means = {}
    for text in (b"abc", b"bc", b"c"):
        each = [expected_logprobs([*prompt, *text[:i]]).logprob for i in range(len(text) + 1)]
        means[text.decode()] = sum(each) / len(each)
    ranked = sorted(means, key=lambda text: -means[text])
    assert [c["text"] for c in one["choices"]] == ranked[:1]
    assert one["choices"][0]["logprobs"] is None
    assert [c["text"] for c in two["choices"]] == ranked[:2]
    assert [c["index"] for c in two["choices"]] == [0, 1]
    assert one["usage"]["completion_tokens"] == 4 + 3 + 2
    assert streamed.json()["error"]["param"] == "best_of"


async def test_tokens_of_a_stop_string_are_not_sent() -> None:
    async with served(b"abSTOPc") as server:
        answer = (await server.chat("Hi", logprobs=True, stop=["STOP"])).json()
        kept = (
            await server.chat("Hi", logprobs=True, stop=["STOP"], include_stop_str_in_output=True)
        ).json()
    for body, text in ((answer, "ab"), (kept, "abSTOP")):
        (choice,) = body["choices"]
        assert choice["message"]["content"] == text
        assert "".join(each["token"] for each in choice["logprobs"]["content"]) == text


async def test_chat_reports_the_logprobs_of_each_token() -> None:
    async with served(b"ab") as server:
        answer = (await server.chat("Hi", logprobs=True, top_logprobs=2)).json()
        response = await server.chat("Hi", logprobs=True, top_logprobs=2, stream=True)
        without = (await server.chat("Hi", logprobs=True)).json()
    prompt = list(b"user: Hi\nassistant:")
    reported = answer["choices"][0]["logprobs"]
    assert reported["refusal"] is None
    assert [each["token"] for each in reported["content"]] == ["a", "b"]
    for i, each in enumerate(reported["content"]):
        expected = expected_logprobs([*prompt, *b"ab"[:i]], 2)
        assert each["bytes"] == [b"ab"[i]]
        assert each["logprob"] == expected.logprob
        assert [top["logprob"] for top in each["top_logprobs"]] == [lp for _, lp in expected.top]
    streamed = [
        each
        for part in chunks(response)
        for choice in part["choices"]
        for each in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == reported["content"]
    assert without["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_tokens_whose_text_is_held_back_are_sent_when_they_come() -> None:
    async with served(b"abx") as server:
        response = await server.chat("Hi", logprobs=True, stop=["abc"], stream=True)
    reported = [
        (choice["delta"].get("content"), len(choice["logprobs"]["content"]))
        for part in chunks(response)
        for choice in part["choices"]
        if choice["logprobs"]
    ]
    assert reported == [("abx", 3)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_reports_logprobs_and_where_its_tokens_begin(stream: bool) -> None:
    async with served(b"ab") as server:
        response = await server.complete("Hi", logprobs=1, echo=True, stream=stream)
    if stream:
        reported: dict[str, list[Any]] = {}
        for part in chunks(response):
            for name, values in (part["choices"][0]["logprobs"] or {}).items():
                reported.setdefault(name, []).extend(values)
        assert text_by_index(chunks(response)) == {0: "Hiab"}
    else:
        (choice,) = response.json()["choices"]
        reported = choice["logprobs"]
        assert choice["text"] == "Hiab"
    said = list(b"Hiab")
    assert reported["tokens"][:4] == ["H", "i", "a", "b"]
    # The last one ends the completion and has no text.
    assert reported["text_offset"] == [0, 1, 2, 3, 4]
    assert reported["token_logprobs"] == [
        None,
        *(expected_logprobs(said[:i]).logprob for i in (1, 2, 3, 4)),
    ]
    assert reported["top_logprobs"][0] is None
    expected = expected_logprobs(said[:3], 1)
    assert reported["top_logprobs"][3] == {"b": expected.logprob, chr(33): expected.top[0][1]}


async def test_the_sampled_token_is_among_those_with_log_probabilities() -> None:
    async with served(b"ab") as server:
        none = (await server.complete("Hi", logprobs=0, echo=True)).json()["choices"][0]
        two = (await server.complete("Hi", logprobs=2)).json()["choices"][0]
    for logprobs, num_most in ((none["logprobs"], 1), (two["logprobs"], 3)):
        pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        for (token, logprob), top in zip(pairs, logprobs["top_logprobs"], strict=True):
            assert top is None or (top[token] == logprob and len(top) == num_most)
    assert none["logprobs"]["top_logprobs"][0] is None


async def test_an_echo_without_logprobs_is_text_before_each_choice() -> None:
    async with served(b"abc", runner=Variants) as server:
        answer = (await server.complete(["x", "y"], echo=True, n=2)).json()
        streamed = chunks(await server.complete("x", echo=True, n=2, stream=True))
    assert [c["text"] for c in answer["choices"]] == ["xabc", "xbc", "yc", "yabc"]
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert text_by_index(streamed) == {0: "xbc", 1: "xc"}


async def test_the_logprobs_of_an_echoed_prompt_come_with_each_of_its_choices() -> None:
    async with served(b"abc", runner=Variants) as server:
        answer = (await server.complete("xy", echo=True, n=2, logprobs=0)).json()
    first, second = (c["logprobs"]["token_logprobs"][:2] for c in answer["choices"])
    assert first == second == [None, expected_logprobs(list(b"x")).logprob]


async def test_progress_is_reported_while_a_long_prompt_is_read() -> None:
    async with served(b"ok") as server:
        chat = chunks(await server.chat("x" * 600, stream=True, return_progress=True))
        text = chunks(await server.complete("y" * 600, stream=True, return_progress=True))
        without = chunks(await server.chat("z" * 600, stream=True))
    num_tokens = 600 + len("user: \nassistant:")
    for parts, total in ((chat, num_tokens), (text, 600)):
        reported = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
        assert [each["total"] for each in reported] == [total] * len(reported)
        assert [each["processed"] for each in reported] == [0, 256, 512, total]
        assert reported[0]["cache"] == 0
        assert reported[0]["time_ms"] <= reported[1]["time_ms"]
    assert not any("prompt_progress" in part for part in without)


async def test_progress_begins_with_what_is_cached_and_ends_with_the_whole_prompt() -> None:
    async with served(b"ok") as server:
        await server.complete("x" * 64)
        parts = chunks(await server.complete("x" * 70, stream=True, return_progress=True, n=2))
    reported = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert [each["processed"] for each in reported] == [64, 70]
    assert {each["cache"] for each in reported} == {64}
    assert "prompt_progress" in parts[0]


def test_progress_that_begins_again_is_not_reported_again() -> None:
    progress = PrefillProgress()
    reported = [list(progress.reports(0, number)) for number in (8, 16, 8, 16, 24)]
    assert reported == [[0, 8], [16], [], [], [24]]
