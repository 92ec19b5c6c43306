"""Responses and their events, exactly; all are of the types of OpenAI's client."""

import json
import threading
from collections.abc import Sequence
from typing import Any, Final

import anyio
import pytest
from starlette.types import Message

from app.api import sse
from app.api.openai.responses import response_writer
from app.api.openai.responses.items.open_items import Event
from app.api.openai.responses.response_writer import EncodedEvent, ResponseWriter
from tests.support.byte_tokenizers import Bytes
from tests.support.fakes import expected_logprobs
from tests.support.responses import (
    PATH,
    Thinking,
    call,
    custom,
    events_in,
    function,
    respond,
    response,
    stream,
    unwritable,
    without_ids,
)
from tests.support.speaker import MODEL_ID, Breaking, ByteTokenizer, served, served_endlessly

pytestmark = pytest.mark.anyio


class Undecodable(ByteTokenizer):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raise ValueError("the secret of the prompt")


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message(text: str, status: str = "completed") -> dict[str, Any]:
    content = [] if status == "in_progress" else [part(text)]
    return {"type": "message", "role": "assistant", "status": status, "content": content}


def in_between(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of the items, without ids and the names of all events."""
    return [
        {"type": event.pop("type").removeprefix("response."), **event}
        for event in without_ids(events[2:-1])
    ]


async def test_a_response_has_all_that_openai_sends() -> None:
    async with served(b"Hello!") as server:
        answer = await response(server, metadata={"k": "v"}, user="u", max_output_tokens=20)
    assert answer.pop("id").startswith("resp_")
    assert answer["output"][0].pop("id").startswith("msg_")
    assert 0 < answer.pop("created_at") <= answer.pop("completed_at")
    prompt = len("user: Hi\nassistant:")
    assert answer == {
        "object": "response",
        "status": "completed",
        "background": False,
        "conversation": None,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 20,
        "max_tool_calls": None,
        "metadata": {"k": "v"},
        "model": MODEL_ID,
        "output": [message("Hello!")],
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + 7,
        },
        "user": "u",
    }


async def test_a_second_response_reads_its_prompt_from_the_cache() -> None:
    async with served(b"Yes.") as server:
        await response(server, "x" * 100)
        usage = (await response(server, "x" * 100))["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert cached == usage["input_tokens"] // 32 * 32 > 0


async def test_the_events_of_a_message() -> None:
    async with served("né".encode()) as server:
        events = await stream(server)
        whole = await response(server)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"] == events[1]["response"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[-1]["type"] == "response.completed"
    last, usage = events[-1]["response"], whole["usage"]
    assert last["id"] == events[0]["response"]["id"]
    assert last["output"] == [events[-2]["item"]]
    assert without_ids(last | {"usage": usage}) == without_ids(whole)
    text = {"output_index": 0, "content_index": 0}
    assert in_between(events) == [
        {"type": "output_item.added", "output_index": 0, "item": message("", "in_progress")},
        {"type": "content_part.added", **text, "part": part("")},
        {"type": "output_text.delta", **text, "delta": "n", "logprobs": []},
        {"type": "output_text.delta", **text, "delta": "é", "logprobs": []},
        {"type": "output_text.done", **text, "text": "né", "logprobs": []},
        {"type": "content_part.done", **text, "part": part("né")},
        {"type": "output_item.done", "output_index": 0, "item": message("né")},
    ]


async def test_a_message_that_is_cut_is_incomplete() -> None:
    async with served(b"Hello!") as server:
        answer = await response(server, "", max_output_tokens=1)
        events = await stream(server, max_output_tokens=1)
    for each in (answer, events[-1]["response"]):
        assert each["status"] == "incomplete"
        assert each["incomplete_details"] == {"reason": "max_output_tokens"}
        assert each["completed_at"] is None
        assert without_ids(each["output"]) == [message("H", "incomplete")]
    assert events[-1]["type"] == "response.incomplete"


async def test_the_events_of_reasoning_are_content() -> None:
    async with served(b"<think>\n12\n</think>\n\n4", tokenizer=Thinking()) as server:
        events = await stream(server)
    item = {"type": "reasoning", "summary": []}
    place = {"output_index": 0, "content_index": 0}
    assert in_between(events)[:8] == [
        {
            "type": "output_item.added",
            "output_index": 0,
            "item": item | {"status": "in_progress", "content": []},
        },
        {"type": "content_part.added", **place, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "reasoning_text.delta", **place, "delta": "1"},
        {"type": "reasoning_text.delta", **place, "delta": "2"},
        {"type": "reasoning_text.done", **place, "text": "12"},
        {"type": "content_part.done", **place, "part": {"type": "reasoning_text", "text": "12"}},
        {
            "type": "output_item.done",
            "output_index": 0,
            "item": item
            | {"status": "completed", "content": [{"type": "reasoning_text", "text": "12"}]},
        },
        {"type": "output_item.added", "output_index": 1, "item": message("", "in_progress")},
    ]
    last = events[-1]["response"]
    assert without_ids(last["output"][1:]) == [message("4")]
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
async def test_the_events_of_a_summary(field: str) -> None:
    async with served(b"<think>12</think>4", tokenizer=Thinking()) as server:
        events = await stream(server, reasoning={field: "auto", "effort": "low"})
    item = {"type": "reasoning"}
    place = {"output_index": 0, "summary_index": 0}
    text = {"type": "summary_text", "text": "12"}
    assert in_between(events)[:7] == [
        {
            "type": "output_item.added",
            "output_index": 0,
            "item": item | {"status": "in_progress", "summary": []},
        },
        {"type": "reasoning_summary_part.added", **place, "part": text | {"text": ""}},
        {"type": "reasoning_summary_text.delta", **place, "delta": "1"},
        {"type": "reasoning_summary_text.delta", **place, "delta": "2"},
        {"type": "reasoning_summary_text.done", **place, "text": "12"},
        {"type": "reasoning_summary_part.done", **place, "part": text},
        {
            "type": "output_item.done",
            "output_index": 0,
            "item": item | {"status": "completed", "summary": [text]},
        },
    ]
    assert events[0]["response"]["reasoning"] == {"effort": "low", "summary": "auto"}


async def test_a_summary_that_is_cut_says_so() -> None:
    async with served(b"<think>12</think>4", tokenizer=Thinking()) as server:
        events = await stream(server, reasoning={"summary": "auto"}, max_output_tokens=8)
    (done,) = [e for e in events if e["type"] == "response.reasoning_summary_part.done"]
    assert (done["part"]["text"], done["status"]) == ("1", "incomplete")


async def test_the_events_of_calls() -> None:
    answer = f"Well. {call('add', a=1)}{call('now')}"
    async with served(answer.encode()) as server:
        events = await stream(server, tools=[function(), function("now")])
    items = without_ids([e["item"] for e in events if e["type"].endswith("item.done")])
    calls = [e["item"] for e in events if e["type"].endswith("item.added")][1:]
    assert items == [
        message("Well."),
        *(
            {"type": "function_call", "status": "completed", "name": name, "arguments": arguments}
            for name, arguments in (("add", '{"a": 1}'), ("now", "{}"))
        ),
    ]
    assert all(each["id"].startswith("fc_") for each in calls)
    assert all(each["call_id"].startswith("call_") for each in calls)
    assert [each["arguments"] for each in calls] == ["", ""]
    deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    first = [e["delta"] for e in deltas if e["item_id"] == calls[0]["id"]]
    assert len(first) > 3
    assert "".join(first) == '{"a": 1}'
    (done, _) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert (done["output_index"], done["name"], done["arguments"]) == (1, "add", '{"a": 1}')


async def test_a_call_in_a_namespace_comes_back_in_two_parts() -> None:
    tools = [{"type": "namespace", "name": "agents", "tools": [function("spawn"), custom("say")]}]
    answer = call("agents__spawn", task="x") + call("agents__say", input="hi")
    async with served(answer.encode(), tokenizer=Bytes()) as server:
        output = (await response(server, tools=tools))["output"]
    assert without_ids(output) == [
        {
            "type": "function_call",
            "status": "completed",
            "name": "spawn",
            "namespace": "agents",
            "arguments": '{"task": "x"}',
        },
        {"type": "custom_tool_call", "name": "say", "namespace": "agents", "input": "hi"},
    ]


async def test_a_call_of_no_tool_is_a_function_call() -> None:
    async with served(call("other").encode()) as server:
        (item,) = (await response(server, tools=[function()]))["output"]
    assert (item["type"], item["name"]) == ("function_call", "other")


async def test_the_input_of_a_custom_call_is_streamed_without_its_json() -> None:
    text = '*** Begin\n"ü" \\ 😊'
    async with served(call("patch", input=text).encode(), tokenizer=Bytes()) as server:
        events = await stream(server, tools=[custom()])
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 10
    assert "".join(deltas) == text
    (done,) = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == text
    (item,) = events[-1]["response"]["output"]
    assert item["id"].startswith("ctc_")
    assert without_ids(item) == {"type": "custom_tool_call", "name": "patch", "input": text}


async def test_a_call_that_is_cut_is_incomplete() -> None:
    async with served(call("add", a=1).encode()) as server:
        answer = await response(server, tools=[function()], max_output_tokens=45)
    (item,) = answer["output"]
    assert answer["status"] == item["status"] == "incomplete"
    assert '{"a": 1}'.startswith(item["arguments"])


async def test_a_call_that_a_stop_string_cuts_is_incomplete() -> None:
    async with served(call("add", a=1).encode()) as server:
        answer = await response(server, tools=[function()], stop="1")
        whole = await response(server, tools=[function()], stop="absent")
    (item,) = answer["output"]
    assert (answer["status"], item["status"]) == ("completed", "incomplete")
    assert item["arguments"] == '{"a": '
    assert whole["output"][0]["status"] == "completed"


async def test_log_probabilities_are_those_of_the_text() -> None:
    async with served(b"ab") as server:
        answer = await response(server, top_logprobs=2)
        events = await stream(server, include=["message.output_text.logprobs"], top_logprobs=2)
        bare = await stream(server, include=["message.output_text.logprobs"])
    reported = answer["output"][0]["content"][0]["logprobs"]
    prompt = list(b"user: Hi\nassistant:")
    assert [each["token"] for each in reported] == ["a", "b"]
    for i, each in enumerate(reported):
        expected = expected_logprobs([*prompt, *b"ab"[:i]], 2)
        assert each["bytes"] == [b"ab"[i]]
        assert each["logprob"] == expected.logprob
        assert [top["logprob"] for top in each["top_logprobs"]] == [lp for _, lp in expected.top]
    streamed = [each for e in events if e["type"].endswith("text.delta") for each in e["logprobs"]]
    (done,) = [e["logprobs"] for e in events if e["type"].endswith("text.done")]
    assert streamed == done
    (added,) = [e["part"] for e in events if e["type"].endswith("part.added")]
    assert (added["text"], added["logprobs"]) == ("", [])
    assert [(each["token"], each["logprob"]) for each in streamed] == [
        (each["token"], each["logprob"]) for each in reported
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == reported
    assert bare[4]["logprobs"][0]["top_logprobs"] == []


async def test_a_long_response_is_written_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, threading.Thread] = {}
    encode = ResponseWriter.encode

    def observed(writer: ResponseWriter, events: Sequence[Event]) -> list[EncodedEvent]:
        threads.update((kind, threading.current_thread()) for kind, _ in events)
        return encode(writer, events)

    monkeypatch.setattr(ResponseWriter, "encode", observed)
    monkeypatch.setattr(response_writer, "_LONG_BYTES", 1024)
    async with served(b"a" * 20) as server:
        whole = await response(server, top_logprobs=20)
        events = await stream(server, top_logprobs=20)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    assert threads["output_text.delta"] is threads["created"] is threading.main_thread()
    for kind in ("output_text.done", "output_item.done", "completed"):
        assert threads[kind] is not threading.main_thread()


async def test_log_probabilities_leave_out_reasoning_and_calls() -> None:
    answer = f"<think>12</think>ab {call('add')} cd"
    async with served(answer.encode(), tokenizer=Thinking()) as server:
        output = (await response(server, tools=[function()], top_logprobs=1))["output"]
    messages = [item["content"][0] for item in output if item["type"] == "message"]
    spelled = ["".join(each["token"] for each in part["logprobs"]) for part in messages]
    assert [part["text"] for part in messages] == spelled == ["ab", " cd"]


async def test_an_agents_request_is_served_with_all_that_it_sends() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
    agent = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0b9d",
        "client_metadata": {"session": "0b9d"},
        "reasoning": {"effort": "medium", "summary": "auto"},
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "text": {"verbosity": "low"},
        "tools": [
            function("shell", description="Runs.", strict=False, parameters={"type": "object"}),
            custom("patch", description="Changes.", format=grammar),
            {
                "type": "namespace",
                "name": "agents",
                "description": "Others.",
                "tools": [function("spawn", strict=False, parameters={"type": "object"})],
            },
            {"type": "web_search", "external_web_access": False},
            {"type": "tool_search", "execution": "client", "description": "Finds tools."},
        ],
    }
    turns: list[dict[str, Any]] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (("developer", "Be brief."), ("user", "Where?"), ("user", "Go on."))
    ]
    answer = f"<think>hm</think>Well. {call('patch', input='aa')}"
    async with served(answer.encode(), tokenizer=Thinking()) as server:
        events = await stream(server, turns, **agent)
        output = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        result = {"type": "custom_tool_call_output", "call_id": output[-1]["call_id"]}
        history = [*turns, *output, result | {"output": "done"}]
        again = await stream(server, history, **agent)
    first, second = events[-1]["response"], again[-1]["response"]
    assert first["status"] == second["status"] == "completed"
    assert [item["type"] for item in output] == ["reasoning", "message", "custom_tool_call"]
    found = second["usage"]["input_tokens_details"]["cached_tokens"]
    # The template of this model writes a space that it does not say.
    assert found >= first["usage"]["input_tokens"] // 32 * 32


async def test_a_failure_in_the_middle_is_an_event() -> None:
    async with served(b"ok", runner=Breaking) as server:
        events = await stream(server)
        whole = await respond(server)
    failed = events[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"] == []
    assert whole.status_code == 500


async def test_an_event_that_cannot_be_written_fails_the_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unwritable(monkeypatch, "response.completed")
    async with served(b"ok") as server:
        failed = (await stream(server))[-1]
        stored = await server.client.get(f"{PATH}/{failed['response']['id']}")
        assert await server.num_unfinished() == 0
    assert failed["type"] == "response.failed"
    assert stored.json() == failed["response"]


async def test_a_first_event_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unwritable(monkeypatch, "response.created")
    async with served(b"ok") as server:
        response = await respond(server, stream=True)
        assert await server.num_unfinished() == 0
    assert response.status_code == 500


async def test_a_bug_in_the_middle_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with served(tokenizer=Undecodable(), late_head_ms=0) as server:
        failed = (await stream(server))[-1]
        whole = await respond(server)
    message = "the server failed while serving this request"
    assert failed["response"]["error"] == {"code": "server_error", "message": message}
    assert whole.json()["error"]["message"] == message
    assert "secret" not in caplog.text


class Client:
    """A connection to the app without a server, for one request."""

    scope: Final[dict[str, Any]] = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    def __init__(self, *, leaves: bool = False, **fields: Any) -> None:
        self._unread = [json.dumps({"input": "Hi"} | fields).encode()]
        self._leaves = leaves
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop()}
        if not self._leaves:
            await anyio.sleep_forever()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


async def test_a_silent_stream_says_in_events_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first token waits until such an event has come; without one this would not end."""
    monkeypatch.setattr(sse, "PING_INTERVAL", 0.01)
    async with served_endlessly() as server:
        client = Client(stream=True, max_output_tokens=3)

        async def send(message: Message) -> None:
            await client.send(message)
            if message.get("body", b"").startswith(b"event: response.in_progress"):
                server.gate.open()

        await server.app(client.scope, client.receive, send)
    text = b"".join(message.get("body", b"") for message in client.sent).decode()
    events = events_in(text)
    assert len([e for e in events if e["type"] == "response.in_progress"]) > 1
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_response(stream: bool) -> None:
    async with served_endlessly() as server:
        client = Client(leaves=True, stream=stream)
        await server.app(client.scope, client.receive, client.send)
        assert await server.num_unfinished() == 0
        assert server.service.admission.num_requests == 0
    assert stream or client.sent[0]["status"] == 499
