"""OpenAI's own client with `/v1/responses`, against a live server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from openai.types.responses import Response

from scripts.server_process import Server, wait_until
from tests.support.live import live_server
from tests.support.responses import ENDLESS, PATH, checked_items, events_in, function
from tests.support.sdk_types import check_shape
from tests.support.weekly import weekly

pytestmark = pytest.mark.timeout(240)

MODEL: Final = "smollm2-135m-instruct"
QUESTION: Final = "What is the capital of France?"
PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Final = function("get_weather", parameters=PARAMETERS, description="Tells the weather.")
CLOCK: Final = function("get_time")
PATCH: Final = {"type": "custom", "name": "patch", "description": "Changes a file."}
AGENTS: Final = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [function("spawn")],
}
SEARCH: Final = {"type": "web_search"}
SCHEMA: Final = {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}

FIELDS: Final[list[dict[str, Any]]] = [
    {},
    {"instructions": "Be brief.", "temperature": 0.7, "top_p": 0.9, "metadata": {"k": "v"}},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"include": ["reasoning.encrypted_content"], "store": False, "prompt_cache_key": "p"},
    {"tools": [WEATHER, CLOCK, PATCH, AGENTS, SEARCH], "parallel_tool_calls": True},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "patch"}},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
    {"tools": [AGENTS], "tool_choice": "required", "parallel_tool_calls": False},
    {"text": {"format": SCHEMA, "verbosity": "low"}},
    {"text": {"format": {"type": "json_object"}}},
    {"reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "flex", "user": "u"},
    {"truncation": "auto", "max_tool_calls": 3, "safety_identifier": "s"},
]


@pytest.fixture(scope="module")
def server(bundled_server: Server) -> Server:
    return bundled_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: Server, **body: Any) -> httpx.Response:
    response = httpx.post(f"{server.url}{PATH}", json={"model": MODEL} | body, timeout=120)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    "fields", weekly(FIELDS, 3, always=[{}]), ids=lambda fields: ",".join(fields) or "none"
)
def test_responses_and_events_have_openais_shape(server: Server, fields: dict[str, Any]) -> None:
    body = {"input": QUESTION, "max_output_tokens": 16, **fields}
    answer = post(server, **body).json()
    check_shape(answer, Response)
    events = events_in(post(server, **body, stream=True).text)
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert done == last["response"]["output"] != []
    if fields.get("store", True):
        url = f"{server.url}{PATH}/{answer['id']}"
        assert httpx.get(url).json() == answer
        checked_items(httpx.get(f"{url}/input_items").json())


def test_the_client_streams_and_joins_what_is_streamed(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input=QUESTION, temperature=0, tools=cast(Any, [WEATHER, PATCH])
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(deltas)
    assert "Paris" in final.output_text


def test_calls_that_have_to_be_made_are_and_their_results_are_read(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="How is the weather in Paris?",
        tools=cast(Any, [WEATHER, SEARCH]),
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    (call,) = answer.output
    assert call.type == "function_call"
    Draft202012Validator(PARAMETERS).validate(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    after = client.responses.create(
        model=MODEL,
        input=cast(Any, [result]),
        previous_response_id=answer.id,
        tools=cast(Any, [WEATHER, SEARCH]),
        max_output_tokens=8,
    )
    assert after.usage is not None
    assert answer.usage is not None
    assert after.usage.input_tokens > answer.usage.input_tokens + 10


def test_each_turn_finds_the_one_before_in_the_cache(client: openai.OpenAI) -> None:
    """The history is an exact prefix, whether it is sent again or taken out of the store."""
    history: list[Any] = [{"role": "user", "content": f"{QUESTION} {'Think of it. ' * 60}"}]
    answer = client.responses.create(model=MODEL, input=history, temperature=0)
    for _ in range(2):
        assert answer.usage is not None
        # Only whole blocks are cached, and not the last token.
        shared = (answer.usage.total_tokens - 1) // 32 * 32
        message = {"role": "user", "content": "And of Italy?"}
        chained = client.responses.create(
            model=MODEL, input=[cast(Any, message)], previous_response_id=answer.id, temperature=0
        )
        history += [*(item.model_dump(exclude_none=True) for item in answer.output), message]
        sent = client.responses.create(model=MODEL, input=history, temperature=0)
        assert chained.usage is not None
        assert sent.usage is not None
        assert chained.usage.input_tokens_details.cached_tokens >= shared
        assert sent.usage.input_tokens == chained.usage.input_tokens
        answer = sent


def test_a_response_in_the_background_is_polled_and_cancelled(client: openai.OpenAI) -> None:
    def begin(prompt: str, **fields: Any) -> str:
        begun: Response = client.responses.create(
            model=MODEL, input=prompt, background=True, **fields
        )
        return begun.id

    def is_done() -> bool:
        return client.responses.retrieve(short).status == "completed"

    short = begin(QUESTION, temperature=0)
    wait_until(is_done, "it does not end")
    assert "Paris" in client.responses.retrieve(short).output_text
    items = list(client.responses.input_items.list(short))
    assert len(items) == 1
    cancelled = client.responses.cancel(begin("Count.", text={"format": ENDLESS}))
    assert cancelled.status == "cancelled"
    client.responses.delete(short)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(short)


def test_responses_outlive_the_server(tmp_path: Path) -> None:
    """What ran is failed after a kill, and after a stop that does not wait for it."""
    settings = {"data_dir": str(tmp_path), "model_id": MODEL, "shutdown_timeout": "0.1"}
    long = {"input": "Count.", "text": {"format": ENDLESS}, "background": True}
    with live_server(**settings) as first:
        kept = post(first, input=QUESTION, max_output_tokens=4).json()
        unfinished = post(first, **long).json()
        first.kill()
    with live_server(**settings) as second:
        found = [httpx.get(f"{second.url}{PATH}/{each['id']}") for each in (kept, unfinished)]
        continued = post(second, input="And?", previous_response_id=kept["id"], max_output_tokens=4)
        assert post(second, **long).json()["status"] == "queued"
        assert second.stop() == 0
    assert found[0].json() == kept
    assert found[1].json()["status"] == "failed"
    assert continued.json()["previous_response_id"] == kept["id"]
