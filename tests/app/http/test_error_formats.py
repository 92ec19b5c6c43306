"""Errors are in the format of the API that the path belongs to."""

import json
from typing import Any, Final

import pytest
from pydantic import SecretStr

from app.http.errors.formats import anthropic_error, error_format, openai_error
from app.http.errors.rejections import (
    BodyTooLarge,
    QueueFull,
    QuotaExceeded,
    ShuttingDown,
    Unauthorized,
)
from app.http.errors.responses import error_report
from app.prompts.render import PromptTooLong
from batching import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineStalled,
    EngineStopped,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    RequestFailed,
)
from tests.support.rows import rows
from tests.support.speaker import served

pytestmark = pytest.mark.anyio

MESSAGES: Final = "/v1/messages"


def anthropic(error: Exception) -> dict[str, Any]:
    body = json.loads(anthropic_error(error_report(error), "req-1"))
    assert body.pop("type") == "error"
    assert body.pop("request_id") == "req-1"
    inner: dict[str, Any] = body.pop("error")
    assert body == {}
    assert inner.keys() == {"type", "message"}
    return inner


@rows(
    ("path", "is_anthropic"),
    [
        (MESSAGES, True),
        (f"{MESSAGES}/count_tokens", True),
        (f"{MESSAGES}/batches", True),
        ("/v1/messages_", False),
        ("/v1/chat/completions", False),
        ("/", False),
    ],
)
def test_the_path_decides(path: str, is_anthropic: bool) -> None:
    format_ = anthropic_error if is_anthropic else openai_error
    assert error_format({"path": path, "headers": []}) is format_


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_at_the_path_of_both_apis_the_client_says_which_is_its(path: str) -> None:
    version = {"anthropic-version": "2023-06-01", "X-Request-Id": "mine"}
    async with served() as server:
        ours = await server.client.delete(path, headers=version)
        openais = await server.client.delete(path)
        of_others = await server.client.get("/v1/files/f", headers=version)
    assert ours.json()["type"] == "error"
    assert ours.json()["request_id"] == ours.headers["request-id"] == "mine"
    for other in (openais, of_others):
        assert other.json().keys() == {"error"}
        assert "request-id" not in other.headers


@rows(
    ("error", "kind"),
    [
        (InvalidRequest("x", "no"), "invalid_request_error"),
        (Unauthorized(), "authentication_error"),
        (ModelNotFound("m"), "not_found_error"),
        (BodyTooLarge(1), "request_too_large"),
        (QuotaExceeded("no", 1), "rate_limit_error"),
        (QueueFull("no", 1), "overloaded_error"),
        (ShuttingDown(1), "overloaded_error"),
        (EngineStalled(), "api_error"),
        (EngineStopped(), "api_error"),
        (RequestFailed(), "api_error"),
        (KeyError("secret"), "api_error"),
        (ModelLoadError("/secret"), "api_error"),
        (DeadlineExceeded(), "timeout_error"),
    ],
)
def test_each_error_has_a_type_of_anthropics(error: Exception, kind: str) -> None:
    written = anthropic(error)
    assert written["type"] == kind
    assert written["message"]
    assert "secret" not in written["message"]


@rows(
    ("error", "message"),
    [
        (InvalidRequest("tools", "no"), "tools: no"),
        (InvalidRequest("max_tokens", "max_tokens is 3"), "max_tokens is 3"),
        (
            ContextLengthExceeded(9000, 10, 8192),
            "prompt is too long: 9000 tokens > 8192 maximum",
        ),
        (PromptTooLong(9000, 8192), "prompt is too long: 9000 tokens > 8192 maximum"),
        (
            ContextLengthExceeded(8192, None, 8192),
            "prompt is too long: 8192 tokens > 8191 maximum",
        ),
    ],
)
def test_the_message_says_what_to_change(error: Exception, message: str) -> None:
    assert anthropic(error)["message"] == message


def test_openais_error_has_both_numbers_of_a_prompt_that_is_too_long() -> None:
    error = json.loads(openai_error(error_report(PromptTooLong(9000, 8192))))["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (9000, 8192)
    assert error["code"] == "context_length_exceeded"


def test_the_text_is_short_and_ascii() -> None:
    for write in (anthropic_error, openai_error):
        body = write(error_report(InvalidRequest("x" * 1000, "\ud800" * 10_000)), "req-1")
        assert body.isascii()
        assert len(body) < 5000


@rows(
    ("content", "message"),
    [
        (b'{"model": ', "the request body is not valid JSON: Expecting value"),
        (b"[]", "the request body must be a JSON object"),
        (b'{"messages": []}', "messages: List should have at least 1 item"),
        (b'{"max_tokens": 0}', "messages: Field required"),
    ],
)
async def test_a_request_that_is_not_valid_is_a_400(content: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
    async with served() as server:
        response = await server.client.post(MESSAGES, content=content, headers=headers)
    assert response.status_code == 400
    body = response.json()
    assert body["request_id"] == "mine"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(message)


async def test_middleware_writes_it_too() -> None:
    async with served(api_keys=SecretStr("sk-one"), max_body_bytes=1024) as server:
        keyless = await server.message()
        server.client.headers["x-api-key"] = "sk-one"
        large = await server.message("x" * 2000)
        unknown = await server.message(model="m")
        nowhere = await server.post(f"{MESSAGES}/batches", {})
        wrong = await server.client.get(MESSAGES)
        beside = await server.chat(model="m")
    assert [
        (response.status_code, response.json()["error"]["type"])
        for response in (keyless, large, unknown, nowhere, wrong)
    ] == [
        (401, "authentication_error"),
        (413, "request_too_large"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
    ]
    assert keyless.headers["www-authenticate"] == "Bearer"
    assert beside.json()["error"]["code"] == "model_not_found"


async def test_a_server_that_shuts_down_is_overloaded_and_says_when_to_retry() -> None:
    async with served() as server:
        server.service.admission.is_draining = True
        response = await server.message()
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "overloaded_error"
    assert int(response.headers["retry-after"]) > 0
