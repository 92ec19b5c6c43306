"""OpenAI's own client, and LangChain, with every parameter, against a live server."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field

from scripts.server_process import Server
from scripts.sse import chunks_in
from tests.support.sdk_types import check_shape
from tests.support.weekly import weekly

pytestmark = pytest.mark.timeout(240)

MODEL: Final = "smollm2-135m-instruct"
QUESTION: Final[list[Any]] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Final[dict[str, Any]] = {"type": "function", "function": {"name": "get_time"}}
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "districts": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "districts"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(bundled_server: Server) -> Server:
    return bundled_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=120)


def chat_chunks(server: Server, **body: Any) -> list[ChatCompletionChunk]:
    response = post(server, "/v1/chat/completions", stream=True, **body)
    return [check_shape(chunk, ChatCompletionChunk) for chunk in chunks_in(response.content)]


CHAT_FIELDS: Final[list[dict[str, Any]]] = [
    {},
    {"n": 2, "temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"logprobs": True, "top_logprobs": 3},
    {"stop": [" of"], "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {"28": -100}, "user": "u", "metadata": {"k": "v"}, "store": False},
    {"response_format": {"type": "json_object"}},
    {"tools": [WEATHER, CLOCK]},
    {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False},
    {"service_tier": "flex", "reasoning_effort": "low", "prompt_cache_key": "p"},
    {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True},
]


@pytest.mark.parametrize(
    "fields", weekly(CHAT_FIELDS, 3, always=[{}]), ids=lambda fields: ",".join(fields) or "none"
)
def test_chat_answers_have_openais_shape(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "max_completion_tokens": 12, **fields}
    response = post(server, "/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    answer: ChatCompletion = check_shape(response.json(), ChatCompletion)
    assert answer.service_tier == fields.get("service_tier", "default")
    assert len(answer.choices) == fields.get("n", 1)
    chunks = chat_chunks(server, stream_options={"include_usage": True}, **body)
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_fields_of_other_servers_have_their_meaning(server: Server) -> None:
    fields = {"max_tokens": 4, "messages": QUESTION}
    logprobs = {"logprobs": True, "logprob_token_ids": [504, 3575], "return_token_ids": True}
    named = post(server, "/v1/chat/completions", **fields, **logprobs).json()
    scored = post(server, "/v1/chat/completions", **fields, prompt_logprobs=1).json()
    grammar = 'root ::= "Berlin" | "Rome"'
    bound = post(server, "/v1/chat/completions", **fields, grammar=grammar).json()
    sampling = {"temperature": 1.5, "top_n_sigma": 0.01}
    best = post(server, "/v1/chat/completions", **fields, **sampling, repeat_penalty=1).json()
    plain = post(server, "/v1/chat/completions", **fields, temperature=0, repeat_penalty=1).json()
    (choice,) = named["choices"]
    for token in choice["logprobs"]["content"]:
        assert token["token"] in [top["token"] for top in token["top_logprobs"]]
        assert len(token["top_logprobs"]) in (2, 3)
    assert len(choice["token_ids"]) == named["usage"]["completion_tokens"]
    assert len(named["prompt_token_ids"]) == named["usage"]["prompt_tokens"]
    assert scored["prompt_logprobs"][0] is None
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
    assert bound["choices"][0]["message"]["content"] in ("Berlin", "Rome")
    assert best["choices"][0]["message"] == plain["choices"][0]["message"]


def test_a_prompt_is_scored_without_a_completion(server: Server) -> None:
    body = {"prompt": "The capital of France is Paris", "echo": True, "logprobs": 0}
    scored = post(server, "/v1/completions", **body, max_tokens=0).json()
    more = post(server, "/v1/completions", **body, max_tokens=1).json()
    (choice,), (longer,) = scored["choices"], more["choices"]
    assert choice["text"] == body["prompt"]
    tokens = len(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["tokens"] == longer["logprobs"]["tokens"][:tokens]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        longer["logprobs"]["token_logprobs"][1:tokens], abs=1e-3
    )
    assert scored["usage"]["completion_tokens"] == 0


COMPLETION_FIELDS: Final[list[dict[str, Any]]] = [
    {},
    {"n": 2, "best_of": 3, "temperature": 0.9, "seed": 1},
    {"logprobs": 2, "echo": True},
    {"prompt": ["One, two,", "A, b,"], "n": 2},
    {"prompt": [504, 3575]},
    {"use_beam_search": True, "n": 2, "best_of": 3},
]


@pytest.mark.parametrize("fields", COMPLETION_FIELDS, ids=lambda f: ",".join(f) or "none")
def test_completions_have_openais_shape(server: Server, fields: dict[str, Any]) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8, **fields}
    raw = post(server, "/v1/completions", **body).json()
    for choice in raw["choices"] if fields.get("echo") else []:
        # Nothing comes before the first token: null, as OpenAI sends and the types do not say.
        for name in ("token_logprobs", "top_logprobs"):
            assert choice["logprobs"][name].pop(0) is None
    answer: Completion = check_shape(raw, Completion)
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    num_prompts = len(prompts) if isinstance(prompts[0], str) else 1
    assert [c.index for c in answer.choices] == list(range(num_prompts * fields.get("n", 1)))


def test_choices_of_a_seed_are_the_same_again_and_unlike_each_other(client: openai.OpenAI) -> None:
    def ask(n: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=n, seed=3, temperature=1, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    three = ask(3)
    assert ask(3) == three
    assert ask(1) == three[:1]
    assert len(set(three)) == 3


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelled = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content)
    assert spelled.decode() == choice.message.content
    for each in choice.logprobs.content:
        assert each.token == each.top_logprobs[0].token
        assert 0 >= each.logprob == each.top_logprobs[0].logprob > each.top_logprobs[1].logprob


def test_an_echoed_prompts_offsets_find_its_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Zürich liegt am See", echo=True, logprobs=0, max_tokens=4, seed=5
    )
    (choice,) = answer.choices
    assert choice.text.startswith("Zürich liegt am See")
    reported = choice.logprobs
    assert reported is not None
    assert reported.token_logprobs is not None
    assert reported.tokens is not None
    assert reported.text_offset is not None
    assert reported.token_logprobs[0] is None
    assert all(lp < 0 for lp in reported.token_logprobs[1:])
    for token, offset in zip(reported.tokens, reported.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text.startswith(token, offset)


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_follows_its_schema(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a city as JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
        n=3,
        temperature=temperature,
        seed=1,
        max_tokens=100,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        Draft202012Validator(CITY).validate(json.loads(choice.message.content or ""))


class City(BaseModel):
    name: str = Field(max_length=12)
    size: str = Field(pattern="^(small|large)$")


@pytest.mark.parametrize(
    ("demand", "pattern"),
    [
        ({"choice": ["Paris", "Rome"]}, r"(Paris|Rome)"),
        ({"regex": r"[A-Z][a-z]{2,5}, [0-9]{4}"}, r"[A-Z][a-z]{2,5}, [0-9]{4}"),
        ({"grammar": 'start: ("yes" | "no") " " /[0-9]{2}/'}, r"(yes|no) [0-9]{2}"),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}, r"\[[^\]]*\]"),
    ],
)
def test_structured_outputs_are_enforced(
    client: openai.OpenAI, demand: dict[str, Any], pattern: str
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="Tell me:",
        max_tokens=40,
        seed=4,
        extra_body={"structured_outputs": demand},
    )
    assert re.fullmatch(pattern, answer.choices[0].text, re.DOTALL)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_tools_that_have_to_be_called_are(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        tools=cast(Any, [WEATHER, CLOCK]),
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=80,
    )
    message = answer.choices[0].message
    # OpenAI's word for a call that the model has not decided on.
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert message.content is None
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        Draft202012Validator(WEATHER["function"]["parameters"]).validate(arguments)
    else:
        assert choice == "required"
        assert arguments == {}


def test_streamed_calls_join_to_whole_ones_and_their_results_are_read(
    client: openai.OpenAI,
) -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=asked,
        tools=cast(Any, [WEATHER]),
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=80,
        stream=True,
    )
    calls: dict[int, dict[str, str]] = {}
    reasons = []
    for chunk in stream:
        for part in chunk.choices[0].delta.tool_calls or []:
            assert part.function is not None
            call = calls.setdefault(part.index, {"arguments": ""})
            if part.id is not None:
                call |= {"id": part.id, "name": part.function.name or ""}
            call["arguments"] += part.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "tool_calls"
    (call,) = calls.values()
    arguments = json.loads(call["arguments"])
    Draft202012Validator(WEATHER["function"]["parameters"]).validate(arguments)
    function = {"name": call["name"], "arguments": call["arguments"]}
    history = [
        *asked,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": '{"degrees": 21}'},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=cast(Any, history), tools=cast(Any, [WEATHER]), max_tokens=8
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 100


def test_the_asynchronous_client_streams_many_at_once(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, seed=seed, max_tokens=8, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, seed % 2) for seed in range(6)))

    texts = asyncio.run(ask_all())
    assert texts[0] == texts[2] == texts[4]
    assert texts[1] == texts[3] == texts[5]


@tool
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It rains in {city}."


def langchain(server: Server, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key=cast(Any, "none"), max_retries=0, **fields
    )


def test_langchain_streams_calls_tools_and_reads_its_types(server: Server) -> None:
    model = langchain(server, temperature=0, max_completion_tokens=60)
    parts = list(model.stream("What is the capital of France?"))
    assert "".join(str(part.content) for part in parts) == "The capital of France is Paris."
    calling = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    asked = HumanMessage("How is the weather in Paris?")
    answer = calling.invoke([asked])
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"] or "")
    assert model.invoke([asked, answer, result]).content
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(City, method=cast(Any, method))
        assert isinstance(structured.invoke("Describe Paris."), City)
