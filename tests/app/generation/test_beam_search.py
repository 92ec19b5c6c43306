"""Beam search against all answers there are."""

import asyncio
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from batching.steps.step_plan import SliceOutput, StepPlan
from batching.steps.token_output import TokenLogprobs
from tests.support.rows import rows
from tests.support.speaker import END, Speaker, served

pytestmark = pytest.mark.anyio

# What may follow the last byte, and how likely; a greedy start leads away from the best answer.
PROBABILITIES: dict[int, dict[int, float]] = {
    ord("?"): {ord("a"): 0.5, ord("b"): 0.4, END: 0.1},
    ord("a"): {ord("a"): 0.28, ord("b"): 0.4, END: 0.32},
    ord("b"): {ord("a"): 0.05, ord("b"): 0.05, END: 0.9},
}


class Chain(Speaker):
    """Knows the log probabilities of three tokens after each other one."""

    def _logprobs(self, prefix: list[int], num_top: int) -> TokenLogprobs:
        falling = sorted(PROBABILITIES[prefix[-1]].items(), key=lambda item: -item[1])
        top = tuple((token, math.log(chance)) for token, chance in falling)
        return TokenLogprobs(top[0][1], top[:num_top])


def every_answer(max_tokens: int) -> dict[tuple[int, ...], float]:
    """Return each answer and the logarithm of its probability."""
    answers: dict[tuple[int, ...], float] = {}
    for length in range(1, max_tokens + 1):
        for tokens in product((ord("a"), ord("b"), END), repeat=length):
            is_whole = tokens[-1] == END or length == max_tokens
            if is_whole and END not in tokens[:-1]:
                steps = zip((ord("?"), *tokens), tokens, strict=False)
                answers[tokens] = sum(math.log(PROBABILITIES[last][token]) for last, token in steps)
    return answers


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token != END).decode()


@rows("length_penalty", [0.0, 1.0, 2.0, -1.0])
@rows("max_tokens", [1, 2, 4])
async def test_a_search_as_wide_as_there_are_answers_finds_the_best(
    length_penalty: float, max_tokens: int
) -> None:
    async with served(b"", runner=Chain) as server:
        answer = (
            await server.complete(
                "?",
                use_beam_search=True,
                n=3,
                best_of=16,
                max_tokens=max_tokens,
                length_penalty=length_penalty,
            )
        ).json()
    answers = every_answer(max_tokens)
    ranked = sorted(answers, key=lambda t: -answers[t] / len(t) ** length_penalty)
    best = ranked[: len(answer["choices"])]
    assert [c["text"] for c in answer["choices"]] == [text_of(tokens) for tokens in best]
    reasons = ["stop" if tokens[-1] == END else "length" for tokens in best]
    assert [c["finish_reason"] for c in answer["choices"]] == reasons
    assert answer["usage"]["completion_tokens"] == sum(map(len, best))


async def test_two_beams_find_what_one_misses_and_each_prompt_has_its_own() -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "max_tokens": 4, "length_penalty": 0}
    async with served(b"", runner=Chain) as server:
        narrow = (await server.complete("?", best_of=1, **fields)).json()
        wide = (await server.complete(["?", "b"], best_of=2, logprobs=1, **fields)).json()
        num_unfinished = await server.num_unfinished()
    assert narrow["choices"][0]["text"] == "ab"
    assert [c["text"] for c in wide["choices"]] == ["b", ""]
    reported = wide["choices"][0]["logprobs"]
    assert reported["token_logprobs"] == pytest.approx([math.log(0.4)])
    (top,) = reported["top_logprobs"]
    assert top == {"a": pytest.approx(math.log(0.5)), "b": reported["token_logprobs"][0]}
    assert num_unfinished == 0


async def test_a_stop_string_ends_a_beams_text() -> None:
    async with served(b"", runner=Chain) as server:
        response = await server.complete("?", use_beam_search=True, stop=["b"], max_tokens=4)
    assert response.json()["choices"][0]["text"] == "a"


@rows(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"top_p": 0.5}, "top_p"),
        ({"temperature": 0.7}, "temperature"),
        ({"echo": True}, "echo"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ],
)
async def test_what_a_search_does_not_take_is_rejected(fields: dict[str, Any], param: str) -> None:
    async with served(b"", runner=Chain) as server:
        response = await server.complete("?", **({"use_beam_search": True} | fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_defaults_that_a_client_says_are_taken() -> None:
    async with served(b"", runner=Chain) as server:
        fields = {"use_beam_search": True, "stream": False, "top_p": 1.0, "temperature": 0}
        assert (await server.complete("?", **fields)).status_code == 200


class Failing(Chain):
    """Fails after a prompt that ends with `b`; any other search would go on for long."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        if any(s.token_ids[-1] == ord("b") for s in plan.slices):
            raise RuntimeError("out of memory")
        return super().run(plan)


async def test_a_search_that_fails_ends_the_others_of_its_request() -> None:
    async with served(b"", runner=Failing) as server:
        response = await server.complete(
            ["?", "b"], use_beam_search=True, best_of=1, max_tokens=500
        )
        assert response.status_code == 500
        assert await server.num_unfinished() == 0
        others = [task for task in asyncio.all_tasks() if "_search" in repr(task)]
    assert others == []


async def test_a_search_that_cannot_fit_the_context_is_rejected_before_it_begins() -> None:
    async with served(b"", runner=Chain, num_blocks=1) as server:
        response = await server.complete("?", use_beam_search=True, max_tokens=32)
    assert response.json()["error"]["code"] == "context_length_exceeded"
