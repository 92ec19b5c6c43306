"""`POST /v1/completions`."""

from typing import Any

import httpx
import pytest

from tests.support.chunks import chunks
from tests.support.fakes import expected_logprobs
from tests.support.rows import rows
from tests.support.speaker import END, MODEL_ID, served

pytestmark = pytest.mark.anyio


async def test_an_answer_has_all_that_openai_sends() -> None:
    async with served(b"Hello!") as server:
        response = await server.complete("Hi")
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": MODEL_ID,
        "choices": [{"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 7,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


@rows("prompt", ["Hi", ["Hi"], [72, 105], [[72, 105]]])
async def test_a_prompt_is_text_or_tokens(prompt: Any) -> None:
    async with served() as server:
        answer = (await server.complete(prompt)).json()
    assert answer["usage"]["prompt_tokens"] == 2


@rows(
    ("prompt", "message"),
    [
        (["a"] * 1025, "prompt: it has 1025 items, and 1024 are the most"),
        ([[1] * 2**19, [1] * 2**19, [1]], "prompt: it has more than 1048576 tokens"),
        (["a", []], "the prompt has no tokens; at least one is needed"),
        ("", "the prompt has no tokens; at least one is needed"),
        ([], "the prompt has no tokens; at least one is needed"),
        ([0, END + 1], f"token id {END + 1} is not in [0, {END + 1})"),
        ([-1], f"token id -1 is not in [0, {END + 1})"),
        ([10**30], f"token id {10**30} is not in [0, {END + 1})"),
        ([1.5], "prompt: it must be a text or a list of token ids"),
        ([True], "prompt: it must be a text or a list of token ids"),
        ([[1], "a", 2], "prompt: it must be a text or a list of token ids"),
        ({}, "prompt: it must be a text or a list of token ids"),
        ("\ud800", "prompt: it contains half of a surrogate pair, which is no text"),
    ],
)
async def test_other_prompts_are_rejected(prompt: Any, message: str) -> None:
    async with served() as server:
        response = await server.complete(prompt)
        echoed = await server.complete(prompt, echo=True)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
    assert echoed.json() == response.json()


async def test_a_completion_has_16_tokens_by_default() -> None:
    async with served(None) as server:
        answer = (await server.complete()).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_the_default_gives_way_to_the_context() -> None:
    async with served(None, num_blocks=1) as server:
        answer = (await server.complete("x" * 30)).json()
        too_long = (await server.complete("x" * 32)).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert too_long["error"]["code"] == "context_length_exceeded"


async def test_max_tokens_that_do_not_fit_are_rejected() -> None:
    async with served(num_blocks=1) as server:
        response = await server.complete("x" * 30, max_tokens=3)
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_the_log_probabilities_of_prompts_in_all_choices_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.generation.job.MAX_LOGPROBS", 4 * 3 * 2)
    body = {"prompt": [97] * 4, "max_tokens": 1, "temperature": 1}
    async with served() as server:
        for fields, status in (
            ({"n": 3, "prompt_logprobs": 1}, 200),
            ({"n": 3, "prompt_logprobs": 2}, 400),
            ({"n": 4, "prompt_logprobs": 1}, 400),
            ({"n": 4, "logprobs": 2}, 200),
            ({"n": 4, "logprobs": 2, "echo": True}, 400),
        ):
            answer = await server.post("/v1/completions", body | fields)
            assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "prompt_logprobs"


async def test_what_all_choices_repeat_of_their_prompts_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Characters of an echo and the tokens of a prompt count alike."""
    monkeypatch.setattr("app.api.openai.completions.router.MAX_ECHOED", 4 * 6)
    both = {"echo": True, "return_token_ids": True}
    async with served() as server:
        for fields, param in (
            ({"echo": True, "n": 6}, None),
            ({"echo": True, "n": 7}, "echo"),
            ({"return_token_ids": True, "n": 7}, "return_token_ids"),
            ({**both, "n": 3}, None),
            ({**both, "n": 4}, "echo"),
        ):
            answer = await server.complete([97] * 4, temperature=1, max_tokens=1, **fields)
            assert answer.json().get("error", {}).get("param") == param


@pytest.mark.parametrize("said", [b"!", b""], ids=["a token", "the end token"])
async def test_an_evaluation_can_take_the_sampled_token_off(said: bytes) -> None:
    """lm-evaluation-harness asks for one token, and drops the last log probability for it."""
    prompts = [list(b"Is it?"), list(b"Yes")]
    scored = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    async with served(said) as server:
        choices = (await server.complete(prompts, **scored)).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        places = range(1, len(prompt))
        expected = [expected_logprobs(prompt[:place], 1) for place in places]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][:-1] == [None, *(each.logprob for each in expected)]
        assert [len(values) for values in logprobs.values()] == [len(prompt) + 1] * 4
        best = [max(top.values()) for top in logprobs["top_logprobs"][1:-1]]
        assert best == [max(each.logprob, each.top[0][1]) for each in expected]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_probabilities_of_an_echo_end_with_its_text(stream: bool) -> None:
    asked = {"echo": True, "logprobs": 1, "max_tokens": 20, "stream": stream}
    stops: tuple[dict[str, Any], ...] = (
        {"stop": "llo"},
        {"stop": "llo", "return_token_ids": True},
        {"stop": "?"},
    )
    async with served(b"Hello!") as server:
        cut, with_ids, whole = [
            echoed_tokens(await server.complete("ab", **asked, **stop)) for stop in stops
        ]
    assert cut == [*"abHe"]
    # One for each of the ids.
    assert with_ids == [*"abHello"]
    assert whole == [*"abHello!", "<end>"]


def echoed_tokens(response: httpx.Response) -> list[str]:
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    parts = chunks(response) if is_stream else [response.json()]
    logprobs = [choice["logprobs"] for part in parts for choice in part["choices"]]
    return [token for each in logprobs if each is not None for token in each["tokens"]]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"return_token_ids": True}])
async def test_a_long_prompt_is_repeated_in_a_stream_as_in_a_whole_response(
    fields: dict[str, Any],
) -> None:
    prompt = [97 + i % 7 for i in range(2500)]
    async with served(b"ok", num_blocks=128) as server:
        (whole,) = (await server.complete(prompt, **fields)).json()["choices"]
        streamed = await server.complete(prompt, stream=True, **fields)
        chat = await server.chat("x" * 2500, stream=True, return_token_ids=True)
    choices = [choice for chunk in chunks(streamed) for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
    reported = [c["logprobs"]["token_logprobs"] for c in choices if c["logprobs"] is not None]
    expected = whole["logprobs"] or {"token_logprobs": []}
    assert [each for part in reported for each in part] == expected["token_logprobs"]
    assert len(chunks(chat)[0]["prompt_token_ids"]) > 2500
