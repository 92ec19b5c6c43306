"""Objects and events of a live server, held to the published OpenAPI documents: `make test-conformance`.

What judges needs an environment of its own; the server runs in the main one, whose interpreter `SERVER_PYTHON` names.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import httpx
import pytest

from scripts.server_process import Server, wait_until
from tests.conformance import documents
from tests.conformance.documents import Document

MODEL: Final = "smollm2-135m-instruct"
QUESTION: Final = "What is the capital of France?"
MESSAGES: Final = [{"role": "user", "content": QUESTION}]
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Final = {"name": "get_weather", "description": "Of a city", "parameters": PARAMETERS}
TOOL: Final = {"type": "function", **FUNCTION}
CUSTOM: Final = {
    "type": "custom",
    "name": "say",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{3}"},
}
PATCH: Final = {"type": "custom", "name": "patch"}
CLAUDE: Final = {"anthropic-version": "2023-06-01"}

openai = cache(documents.openai)
anthropic = cache(documents.anthropic)
open_responses = cache(documents.open_responses)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(python=os.environ["SERVER_PYTHON"], pooling="last") as started:
        yield started
        assert started.stop() == 0


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    response = httpx.post(f"{server.url}{path}", json={"model": MODEL} | body, timeout=240)
    assert response.status_code == 200, response.text
    return response


def get(server: Server, path: str, **headers: str) -> Any:
    return httpx.get(f"{server.url}{path}", headers=headers).json()


def data_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def check(document: Document, value: Any, name: str) -> None:
    found = document.faults(value, name)
    assert not found, (found, value)


def check_event(document: Document, event: dict[str, Any]) -> None:
    found = document.event_faults(event)
    assert not found, (found, event)


CHATS: Final[list[dict[str, Any]]] = [
    {},
    {"n": 2, "seed": 5, "service_tier": "flex"},
    {"logprobs": True, "top_logprobs": 2},
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
]


@pytest.mark.parametrize("fields", CHATS, ids=lambda fields: ",".join(fields) or "none")
def test_chats(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 24, **fields}
    path = "/v1/chat/completions"
    check(openai(), post(server, path, **body).json(), "CreateChatCompletionResponse")
    chunks = data_of(
        post(server, path, **body, stream=True, stream_options={"include_usage": True})
    )
    assert len(chunks) > 3
    for chunk in chunks:
        check(openai(), chunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2, "best_of": 2}])
def test_completions(server: Server, fields: dict[str, Any]) -> None:
    body = {"prompt": QUESTION, "max_tokens": 4, **fields}
    check(openai(), post(server, "/v1/completions", **body).json(), "CreateCompletionResponse")
    for chunk in data_of(post(server, "/v1/completions", **body, stream=True)):
        for choice in chunk["choices"]:
            # Null until the last chunk: the document has one type for all.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(openai(), chunk, "CreateCompletionResponse")


RESPONSES: Final[list[dict[str, Any]]] = [
    {},
    {"instructions": "Be brief.", "metadata": {"k": "v"}, "user": "u", "service_tier": "priority"},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "truncation": "auto"},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "store": False, "max_tool_calls": 3},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
    {"text": {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS}}},
    {"reasoning": {"effort": "low", "summary": "auto"}, "prompt_cache_key": "k"},
]


@pytest.mark.parametrize("fields", RESPONSES, ids=lambda fields: ",".join(fields) or "none")
def test_responses(server: Server, fields: dict[str, Any]) -> None:
    body = {"input": QUESTION, "max_output_tokens": 24, **fields}
    whole = post(server, "/v1/responses", **body).json()
    events = data_of(post(server, "/v1/responses", **body, stream=True))
    assert len(events) > 5
    check(openai(), whole, "Response")
    check(open_responses(), whole, "ResponseResource")
    for event in events:
        check_event(openai(), event)
        if event["type"] in ("response.completed", "response.incomplete"):
            check(open_responses(), event["response"], "ResponseResource")
        else:
            check_event(open_responses(), event)


def test_custom_tools_and_stored_responses(server: Server) -> None:
    """Open Responses has no custom tools."""
    fields = {"tools": [CUSTOM, PATCH], "tool_choice": {"type": "custom", "name": "say"}}
    whole = post(server, "/v1/responses", input=QUESTION, max_output_tokens=40, **fields).json()
    check(openai(), whole, "Response")
    stream = post(
        server, "/v1/responses", input=QUESTION, max_output_tokens=40, stream=True, **fields
    )
    for event in data_of(stream):
        check_event(openai(), event)
    path = f"/v1/responses/{whole['id']}"
    check(openai(), get(server, path), "Response")
    items = get(server, f"{path}/input_items")
    check(openai(), items, "ResponseItemList")
    deleted = httpx.delete(f"{server.url}{path}").json()
    assert deleted == {"id": whole["id"], "object": "response", "deleted": True}


ITEMS: Final[list[dict[str, Any]]] = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": QUESTION},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            {"type": "input_file", "file_id": "file-1"},
        ],
    },
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"role": "assistant", "content": "Paris."},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "2"},
    {"type": "custom_tool_call", "call_id": "2", "name": "say", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "y"},
    {"type": "compaction", "encrypted_content": "x"},
]


def test_conversations(server: Server) -> None:
    begun = httpx.post(f"{server.url}/v1/conversations", json={"metadata": {"k": "v"}}).json()
    check(openai(), begun, "ConversationResource")
    path = f"/v1/conversations/{begun['id']}"
    check(openai(), get(server, path), "ConversationResource")
    fields = {"input": QUESTION, "conversation": begun["id"], "max_output_tokens": 4}
    check(openai(), post(server, "/v1/responses", **fields).json(), "Response")
    query = "?include[]=reasoning.encrypted_content"
    added = httpx.post(f"{server.url}{path}/items{query}", json={"items": ITEMS}).json()
    check(openai(), added, "ConversationItemList")
    listed = get(server, f"{path}/items{query}")
    check(openai(), listed, "ConversationItemList")
    assert len(listed["data"]) == 2 + len(ITEMS)
    item = f"{path}/items/{listed['first_id']}"
    check(openai(), get(server, item), "ConversationItem")
    check(openai(), httpx.delete(f"{server.url}{item}").json(), "ConversationResource")
    deleted = httpx.delete(f"{server.url}{path}").json()
    check(openai(), deleted, "DeletedConversationResource")


CLAUDES: Final[list[dict[str, Any]]] = [
    {},
    {"system": "Be brief.", "stop_sequences": ["Paris"]},
    {
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any"},
    },
]


@pytest.mark.parametrize("fields", CLAUDES, ids=lambda fields: ",".join(fields) or "none")
@pytest.mark.parametrize("prefix", ["", "Beta"])
def test_messages(server: Server, prefix: str, fields: dict[str, Any]) -> None:
    path = "/v1/messages" + ("?beta=true" if prefix else "")
    body = {"messages": MESSAGES, "max_tokens": 24, **fields}
    check(anthropic(), post(server, path, **body).json(), f"{prefix}Message")
    events = data_of(post(server, path, **body, stream=True))
    assert len(events) > 5
    for event in events:
        # Not in the document, though Anthropic sends it.
        if event["type"] != "ping":
            words = event["type"].split("_")
            check(anthropic(), event, prefix + "".join(map(str.capitalize, words)) + "Event")
    path = path.replace("messages", "messages/count_tokens")
    count = post(server, path, messages=MESSAGES).json()
    check(anthropic(), count, f"{prefix}CountMessageTokensResponse")


def test_embeddings(server: Server) -> None:
    answer = post(server, "/v1/embeddings", input=["Hi", QUESTION]).json()
    check(openai(), answer, "CreateEmbeddingResponse")


def test_models(server: Server) -> None:
    """OpenAI's have fields of llama.cpp and vLLM besides."""
    listed = get(server, "/v1/models")
    ours = {"id", "object", "created", "owned_by"}
    for card in (*listed["data"], get(server, f"/v1/models/{MODEL}")):
        check(openai(), {name: card[name] for name in ours}, "Model")
    found = get(server, "/v1/models", **CLAUDE)
    check(anthropic(), found, "ListResponse_ModelInfo_")
    check(anthropic(), get(server, f"/v1/models/{MODEL}", **CLAUDE), "ModelInfo")


def ended(server: Server, path: str) -> Any:
    """Return a batch when it is over."""
    ends = ("completed", "failed")
    wait_until(lambda: get(server, path)["status"] in ends, "it does not end")
    return get(server, path)


def test_files_and_batches(server: Server) -> None:
    check(openai(), get(server, "/v1/files"), "ListFilesResponse")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    rows = [json.dumps(line | {"body": {"prompt": "Hi", "max_tokens": 2}}), "not JSON"]
    batches = []
    for row in rows:
        uploaded = httpx.post(
            f"{server.url}/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", row.encode())},
        ).json()
        check(openai(), uploaded, "OpenAIFile")
        batch = post(
            server, "/v1/batches", input_file_id=uploaded["id"], endpoint="/v1/completions"
        ).json()
        check(openai(), batch, "Batch")
        batches.append(ended(server, f"/v1/batches/{batch['id']}"))
        check(openai(), batches[-1], "Batch")
    assert [batch["status"] for batch in batches] == ["completed", "failed"]
    check(openai(), get(server, "/v1/batches"), "ListBatchesResponse")
    check(openai(), get(server, "/v1/files"), "ListFilesResponse")
    deleted = httpx.delete(f"{server.url}/v1/files/{batches[0]['input_file_id']}").json()
    check(openai(), deleted, "DeleteFileResponse")


def test_errors(server: Server) -> None:
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/files/none")
    for path in paths:
        answer = httpx.post(f"{server.url}{path}", json={"model": "gone", "input": 1})
        assert answer.status_code >= 400
        check(openai(), answer.json(), "ErrorResponse")
    for body in ({"messages": MESSAGES, "max_tokens": 8, "model": "gone"}, {"messages": 1}):
        answer = httpx.post(f"{server.url}/v1/messages", json=body)
        assert answer.status_code >= 400
        check(anthropic(), answer.json(), "ErrorResponse")
        assert answer.json()["request_id"] == answer.headers["request-id"]
