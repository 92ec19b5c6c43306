"""`/api/chat` and `/api/generate`: what Ollama's clients read, and what is rejected."""

import json
from typing import Any, Final

import httpx
import pytest
from pydantic import SecretStr, TypeAdapter, ValidationError

from app.admission.admitted_request import Deadline
from app.api.ollama.fields import FOREVER, KeepAlive
from app.api.ollama.messages import Turn, chat_messages
from app.api.ollama.request import ChatRequest, GenerateRequest
from app.api.ollama.response_builder import AnswerWriter, lines_form
from app.generation.choice import Delta
from app.parsing.events import ContentPiece, ReasoningPiece, ToolCallArguments, ToolCallStart
from batching import FinishReason, ModelState
from tests.support.speaker import MODEL_ID, Breaking, ByteTokenizer, Served, served

pytestmark = pytest.mark.anyio

TURNS: Final = [{"role": "user", "content": "Hi"}]
WEATHER: Final = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
DURATIONS: Final = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def chat(server: Served, **fields: Any) -> httpx.Response:
    return await server.post("/api/chat", {"model": MODEL_ID, "messages": TURNS} | fields)


async def generate(server: Served, **fields: Any) -> httpx.Response:
    return await server.post("/api/generate", {"model": MODEL_ID, "prompt": "Hi"} | fields)


def lines(response: httpx.Response) -> list[Any]:
    return [json.loads(line) for line in response.text.splitlines()]


async def test_an_answer_is_streamed_as_lines() -> None:
    async with served(b"Hello!") as server:
        response = await chat(server, model=f"{MODEL_ID}:latest")
    assert response.headers["Content-Type"] == "application/x-ndjson"
    *parts, last = lines(response)
    assert "".join(part["message"]["content"] for part in parts) == "Hello!"
    assert not any(part["done"] for part in parts)
    assert all(last.pop(name) >= 0 for name in DURATIONS)
    assert last.pop("created_at")
    assert last == {
        "model": f"{MODEL_ID}:latest",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": len("user: Hi\nassistant:"),
        "eval_count": 7,
    }


async def test_an_answer_is_one_object_without_a_stream() -> None:
    async with served(b"Hello!") as server:
        options = {"num_predict": 3, "num_ctx": 1 << 20, "seed": -1, "stop": ["x"]}
        response = await generate(server, stream=False, options=options, system="Be kind.")
        raw = await generate(server, stream=False, raw=True, logprobs=True, top_logprobs=2)
    answer = response.json()
    assert (answer["response"], answer["done_reason"]) == ("Hel", "length")
    assert answer["prompt_eval_count"] == len("system: Be kind.\nuser: Hi\nassistant:")
    answer = raw.json()
    assert answer["prompt_eval_count"] == 2
    assert [each["token"] for each in answer["logprobs"]][:6] == list("Hello!")
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2


async def test_a_model_without_a_template_continues_the_prompt() -> None:
    class NoTemplate(ByteTokenizer):
        has_chat_template = False

    async with served(b"!", tokenizer=NoTemplate()) as server:
        answer = (await generate(server, stream=False)).json()
        refused = await generate(server, system="Be kind.")
    assert answer["prompt_eval_count"] == 2
    assert refused.status_code == 400


async def test_a_last_turn_of_the_assistant_is_continued() -> None:
    async with served(b"!") as server:
        messages = [*TURNS, {"role": "assistant", "content": "Hell"}]
        answer = (await chat(server, stream=False, messages=messages)).json()
    assert answer["prompt_eval_count"] == len("user: Hi\nassistant: Hell")


def test_a_format_is_a_grammar_of_the_content() -> None:
    made = {
        form: GenerateRequest.model_validate(
            {"model": "m", "prompt": "a", "format": value}
        ).grammar()
        for form, value in {"json": "json", "schema": {"type": "object"}, "": ""}.items()
    }
    assert made[""] is None
    assert made["json"] is not None and made["schema"] is not None
    assert made["json"].param == "format"


async def test_a_stream_that_fails_ends_with_a_line_of_the_error() -> None:
    async with served(b"Hello!", runner=Breaking) as server:
        *_, last = lines(await chat(server))
    assert last.keys() == {"error"}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"think": True}, "think"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"shift": True}, "shift"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "a"}}]}]}, "calls"),
        ({"messages": [{"role": "system", "images": ["aa"]}]}, "images"),
        ({"messages": [{"role": "user", "content": "", "images": ["aa"]}]}, "images"),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], word: str) -> None:
    async with served() as server:
        response = await chat(server, **fields)
    assert response.status_code == 400
    assert word in response.json()["error"]


@pytest.mark.parametrize(
    "fields", [{"context": [1]}, {"template": "{{ .Prompt }}"}, {"raw": True, "system": "a"}]
)
async def test_what_is_not_supported_is_named(fields: dict[str, Any]) -> None:
    async with served() as server:
        response = await generate(server, **fields)
    assert response.status_code == 400
    assert [name for name in fields if name in response.json()["error"]]


async def test_an_unknown_model_is_not_found() -> None:
    async with served() as server:
        response = await chat(server, model="no:latest")
    assert response.status_code == 404
    assert "'no'" in response.json()["error"]


async def test_a_request_without_a_prompt_loads_and_unloads() -> None:
    async with served() as server:
        (loaded,) = lines(await chat(server, messages=[]))
        assert loaded["done_reason"] == "load"
        assert server.manager.loaded(MODEL_ID) is not None
        unloaded = (await generate(server, prompt="", keep_alive=0, stream=False)).json()
        assert unloaded["done_reason"] == "unload"
        await server.until(ModelState.UNLOADED)


async def test_keep_alive_says_how_long_a_model_stays() -> None:
    async with served() as server:
        await chat(server, keep_alive="10m")
        (status,) = server.manager.statuses()
        assert status.expires_in is not None and 590 < status.expires_in <= 600
        await chat(server, keep_alive=-1)
        (status,) = server.manager.statuses()
        assert status.expires_in is None
        await chat(server, keep_alive="0s")
        await server.until(ModelState.UNLOADED)


async def test_with_keys_only_an_admin_says_how_long() -> None:
    async with served(api_keys=SecretStr("user"), admin_keys=SecretStr("boss")) as server:
        server.client.headers["Authorization"] = "Bearer user"
        await chat(server, keep_alive=5)
        (status,) = server.manager.statuses()
        assert status.expires_in is None
        assert (await chat(server, messages=[], keep_alive=0)).status_code == 403
        server.client.headers["Authorization"] = "Bearer boss"
        assert (await chat(server, messages=[], keep_alive=0)).status_code == 200


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("-1m", FOREVER),
        (-1, FOREVER),
        ("0", 0),
        (7, 7),
    ],
)
def test_a_duration_is_read(value: Any, seconds: float) -> None:
    assert TypeAdapter(KeepAlive).validate_python(value) == seconds


@pytest.mark.parametrize("value", ["", "5", "m", "5x", True, [], "9" * 40 + "s"])
def test_what_is_no_duration_is_rejected(value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(KeepAlive).validate_python(value, strict=True)


def test_results_belong_to_their_calls() -> None:
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    turns = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "b", "content": "of b"},
        {"role": "tool", "content": "of a"},
        {"role": "tool", "content": "of none"},
    ]
    made = list(chat_messages(Turn.model_validate(turn) for turn in turns))
    assert [call.id for call in made[0].tool_calls] == ["call00000", "call00001"]
    assert [each.tool_call_id for each in made[1:]] == ["call00001", "call00000", ""]


def test_thinking_is_an_effort_or_a_switch() -> None:
    made = ChatRequest(model="m", messages=[Turn(role="user", content="Hi")], think="low")
    assert made.to_conversation().reasoning_effort == "low"
    off = GenerateRequest(model="m", prompt="Hi", think=False, images=["aa"])
    assert off.to_conversation().thinking is False
    assert next(iter(off.attachments.values())).param == "images"


def test_a_call_is_written_when_it_is_complete() -> None:
    writer = AnswerWriter(model="m", is_chat=True, deadline=Deadline(0.0))
    start = ToolCallStart(0, "c1", "get_weather")
    assert writer.line(Delta(0, events=[start])) is None
    assert writer.line(Delta(0, events=[ToolCallArguments(0, '{"n": 1e400')])) is None
    line = writer.line(Delta(0, events=[ToolCallArguments(0, "}"), ToolCallStart(1, "c2", "f")]))
    assert line is not None and b'"arguments":{"n": 1e400}' in line
    line = writer.line(Delta(0, finish_reason=FinishReason.TOOL_CALLS))
    assert line is not None
    (call,) = json.loads(line)["message"]["tool_calls"]
    assert call == {"id": "c2", "function": {"index": 1, "name": "f", "arguments": {}}}


def test_reasoning_is_beside_the_content() -> None:
    writer = AnswerWriter(model="m", is_chat=True, deadline=Deadline(0.0))
    line = writer.line(Delta(0, events=[ReasoningPiece("hm"), ContentPiece("ok")]))
    assert line is not None
    assert json.loads(line)["message"] == {"role": "assistant", "content": "ok", "thinking": "hm"}


def test_a_stream_that_waits_has_lines_that_add_nothing() -> None:
    writer = AnswerWriter(model="m", is_chat=False, deadline=Deadline(0.0))
    form = lines_form(writer)
    line = json.loads(form.comment("the model is being loaded"))
    assert (line["response"], line["done"]) == ("", False)
    assert form.error(b'{"error": "no"}') == b'{"error": "no"}\n'


def test_what_no_request_says_is_of_its_kind() -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"model": "m", "messages": [{"role": "user"}] * 9000})


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded"])
async def test_a_body_may_come_as_curl_sends_it(content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    body = json.dumps({"model": MODEL_ID, "messages": TURNS, "stream": False})
    async with served(b"Hello!") as server:
        answer = await server.client.post("/api/chat", content=body, headers=headers)
        text = await server.client.post("/api/chat", content=body, headers={"Content-Type": "a/b"})
    assert answer.json()["message"]["content"] == "Hello!"
    assert text.status_code == 400
