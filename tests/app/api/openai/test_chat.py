"""`POST /v1/chat/completions`, whole answers and what is rejected."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from app.api.openai.chat.messages import MessageParam
from app.generation.generation import Generation
from app.generation.job import build_job
from app.generation.params import GenerationParams
from app.generation.submit import submit
from tests.support.speaker import (
    MODEL_ID,
    ByteTokenizer,
    Served,
    served,
    served_endlessly,
)

pytestmark = pytest.mark.anyio


class NoTemplate(ByteTokenizer):
    has_chat_template = False


class TalkativeEnd(ByteTokenizer):
    """Does not know that the token which ends a text is special; some models' files forget it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return super().decode(token_ids)


async def test_an_answer_has_all_that_openai_sends() -> None:
    async with served(b"Hello!") as server:
        response = await server.chat("Hi", max_tokens=20)
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "chat.completion",
        "model": MODEL_ID,
        "service_tier": "default",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello!",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len("user: Hi\nassistant:"),
            "completion_tokens": len("Hello!") + 1,
            "total_tokens": len("user: Hi\nassistant:") + len("Hello!") + 1,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


async def test_a_second_request_reads_its_prompt_from_the_cache() -> None:
    async with served(b"Yes.") as server:
        question = "x" * 100
        await server.chat(question)
        usage = (await server.chat(question)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 32 * 32 > 0


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_ends_an_answer(field: str) -> None:
    async with served(b"Hello!") as server:
        answer = (await server.chat(**{field: 3})).json()
    assert answer["choices"][0]["message"]["content"] == "Hel"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


async def test_the_newer_name_of_max_tokens_wins() -> None:
    async with served(b"Hello!") as server:
        answer = (await server.chat(max_tokens=5, max_completion_tokens=2)).json()
    assert answer["usage"]["completion_tokens"] == 2


async def test_without_max_tokens_a_completion_fills_the_context() -> None:
    async with served(None, num_blocks=4) as server:
        answer = (await server.chat()).json()
    assert answer["usage"]["total_tokens"] == 4 * 32
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_without_a_model_the_default_answers() -> None:
    async with served() as server:
        answer = (await server.chat(model=None)).json()
    assert answer["model"] == MODEL_ID


@pytest.mark.parametrize("stop", ["lo wo", ["zzz", "lo wo", "world"]])
async def test_a_stop_string_is_not_in_the_answer(stop: Any) -> None:
    async with served(b"Hello world, hello!") as server:
        answer = (await server.chat(stop=stop)).json()
        num_unfinished = await server.num_unfinished()
    assert answer["choices"][0]["message"]["content"] == "Hel"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("Hello wo")
    assert num_unfinished == 0


async def test_the_token_that_ends_a_text_is_not_in_it() -> None:
    async with served(b"Hello!", tokenizer=TalkativeEnd()) as server:
        answer = (await server.chat()).json()
    assert answer["choices"][0]["message"]["content"] == "Hello!"


async def test_a_client_that_leaves_fields_null_gets_the_defaults() -> None:
    fields = ["temperature", "top_p", "stop", "n", "tools", "logit_bias", "stream", "priority"]
    async with served() as server:
        response = await server.chat(**dict.fromkeys(fields))
    assert response.status_code == 200


def test_what_the_template_gets() -> None:
    parts = [{"type": "text", "text": text} for text in "ab"]
    sent: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Al"},
        {"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "hm"},
    ]
    messages = [MessageParam.model_validate(message).to_message() for message in sent]
    assert [message.template_fields() for message in messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "Al"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


async def test_a_template_that_rejects_is_the_clients_fault() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]
    async with served() as server:
        response = await server.chat(messages=messages)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert error["message"].endswith("the system message comes first")


async def test_a_model_without_a_template_cannot_chat() -> None:
    async with served(tokenizer=NoTemplate()) as server:
        response = await server.chat()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_error_of_too_long_a_request_has_the_numbers(stream: bool) -> None:
    async with served(num_blocks=4) as server:
        response = await server.chat("x" * 200, max_tokens=10, stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 128 tokens. However, you requested"
    )
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (217, 128)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stopped_engine_is_a_503(stream: bool) -> None:
    async with served() as server:
        server.engine.stop()
        response = await server.chat(stream=stream)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


async def test_each_request_is_logged_once_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="app")
    async with served(b"Hello!") as server:
        server.client.headers["X-Request-Id"] = "mine"
        answer = await server.chat("secret")
    assert answer.headers["X-Request-Id"] == "mine"
    (line,) = [record.getMessage() for record in caplog.records]
    head = f"id={answer.json()['id']} request_id=mine client=anonymous prompt=23 cached=0 output=7"
    assert line.startswith(head)
    assert line.endswith("preemptions=0 reason=stop")
    assert "secret" not in line


async def generation(server: Served, *stops: str) -> Generation:
    params = GenerationParams(stop=stops)
    job = build_job(
        server.engine, [[72]], params, completion_id="chatcmpl-1", max_output_tokens=10**6
    )
    return await submit(server.engine, job, server.admitted())


async def test_a_generation_that_is_closed_twice_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="app")
    async with served() as server:
        begun = await generation(server)
        begun.close()
        begun.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert " prompt=1 cached=0 output=0 queue=" in line
    assert line.endswith("reason=aborted")


async def test_a_stop_string_ends_the_request_before_the_stream_is_closed() -> None:
    async with served_endlessly() as server:
        begun = await generation(server, "a")
        (answer,) = await begun.collect()
        assert (answer.events, answer.finish_reason) == ([], "stop")
        num_unfinished = await server.num_unfinished()
        begun.close()
    assert num_unfinished == 0


async def test_tokens_that_are_held_back_count_when_the_client_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="app")
    async with served_endlessly() as server:
        begun = await generation(server)
        server.gate.open()
        collecting = asyncio.create_task(begun.collect())
        while begun.usage.num_output_tokens < 9:  # noqa: ASYNC110
            await asyncio.sleep(0)
        collecting.cancel()
        begun.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert int(line.split(" output=")[1].split()[0]) >= 9
    assert line.endswith("reason=aborted")
