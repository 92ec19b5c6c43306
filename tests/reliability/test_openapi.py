"""What the server says of itself is true, and nothing that can be made of it breaks it."""

import json
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from random import Random
from typing import Any, Final

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import APIOperation, BaseSchema

from scripts.server_process import Server
from tests.support.batches import BATCHES, FILES
from tests.support.hostile.apis import (
    CHAT,
    COMPLETIONS,
    CONVERSATIONS,
    COUNT,
    MESSAGES,
    RENDER,
    RESPONSES,
)
from tests.support.weekly import WEEK, weekly

pytestmark = pytest.mark.timeout(240)

# Others each week.
NUM_EXAMPLES: Final = [4, pytest.param(30, marks=pytest.mark.slow)]
MODEL: Final = "smollm2-135m-instruct"
CONVERSATION: Final = f"{CONVERSATIONS}/{{conversation_id}}"
INPUT_TOKENS: Final = f"{RESPONSES}/input_tokens"
TIMEOUT: Final = 30.0
MAX_ANSWER: Final = 2048
OLLAMA: Final = ("/api/chat", "/api/generate", "/api/show", "/api/embed", "/api/embeddings")
OPERATIONS: Final = [
    f"POST {CHAT}",
    f"POST {RENDER}",
    f"POST {COMPLETIONS}",
    f"POST {MESSAGES}",
    f"POST {COUNT}",
    f"POST {RESPONSES}",
    f"POST {INPUT_TOKENS}",
    f"POST {RESPONSES}/compact",
    f"GET {RESPONSES}/{{response_id}}",
    f"DELETE {RESPONSES}/{{response_id}}",
    f"GET {RESPONSES}/{{response_id}}/input_items",
    f"POST {RESPONSES}/{{response_id}}/cancel",
    f"POST {CONVERSATIONS}",
    f"GET {CONVERSATION}",
    f"POST {CONVERSATION}",
    f"DELETE {CONVERSATION}",
    f"POST {CONVERSATION}/items",
    f"GET {CONVERSATION}/items",
    f"GET {CONVERSATION}/items/{{item_id}}",
    f"DELETE {CONVERSATION}/items/{{item_id}}",
    *(f"POST {path}" for path in OLLAMA),
    "GET /api/tags",
    "GET /api/ps",
    "POST /api/pull",
    "DELETE /api/delete",
    "GET /api/version",
    "POST /infill",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /rerank",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "POST /v1/score",
    "POST /score",
    "POST /v1/decisions",
    "POST /v1/systemone",
    f"POST {FILES}",
    f"GET {FILES}",
    f"GET {FILES}/{{file_id}}",
    f"DELETE {FILES}/{{file_id}}",
    f"GET {FILES}/{{file_id}}/content",
    f"POST {BATCHES}",
    f"GET {BATCHES}",
    f"GET {BATCHES}/{{batch_id}}",
    f"POST {BATCHES}/{{batch_id}}/cancel",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{model_id}",
    "POST /models/load",
    "POST /models/unload",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /version",
    "GET /load",
    "GET /kv_event_sources",
]
WITH_BODY: Final = [op for op in OPERATIONS if op.startswith("POST") and "{" not in op]
# Beside these there is one that data of the right types is taken; rules over several fields are
# not in the document, so that is not promised.
CHECK_NAMES: Final = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
]
RANKED: Final = {"query": "Hi", "documents": ["Ho"]}
SCORED: Final = {"text_1": "Hi", "text_2": "Ho"}
PREDICATE: Final = {"type": "predicate", "instructions": "Is it?"}
NOUL: Final = {"type": "noul", "instructions": "Is it?"}
# A request that is served, to which fields are added.
SERVED: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    RENDER: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    COUNT: {"messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"input": "Hi"},
    INPUT_TOKENS: {"input": "Hi"},
    CONVERSATIONS: {"items": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"model": MODEL, "prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/rerank": RANKED,
    "/v1/score": SCORED,
    "/score": SCORED,
    "/v1/decisions": {"input": "Hi", "questions": [PREDICATE]},
    "/v1/systemone": {"state": "Hi", "questions": {"a": NOUL}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
# How much of an answer is made, and in how many seconds: some would be over at once.
LIMITS: Final[dict[str, Any]] = {
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "n": 2,
    "best_of": 2,
    "timeout": 60,
}

Test = Callable[..., None]


def examples(count: int) -> Callable[[Test], Test]:
    """Return what makes a test try so many examples."""
    tried = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(WEEK)(tried(test))


@cache
def document_of(url: str) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def operation(server: Server, label: str) -> APIOperation[Any, Any, Any, Any]:
    method, path = label.split()
    found: APIOperation[Any, Any, Any, Any] = document_of(server.url)[path][method]
    return found


def check(case: Case[Any]) -> None:
    """Send a request, with little to generate, and hold the answer to the document."""
    body: Any = case.body
    if isinstance(body, dict):
        given = {name: value for name, value in body.items() if value is not None}
        short = {name: limit for name, limit in LIMITS.items() if _is_above_0(given.get(name))}
        if case.operation.path == RESPONSES:
            short["max_output_tokens"] = 1
        elif "max_tokens" not in given and "max_completion_tokens" not in given:
            short["max_tokens"] = 1
        if case.path in ("/api/chat", "/api/generate"):
            short = {"options": {"num_predict": 1}} if "options" not in given else {}
        case.body = body | short
    response = case.call(timeout=TIMEOUT)
    load_all_checks()
    checks: list[Any] = CHECKS.get_by_names(CHECK_NAMES)
    case.validate_response(response, checks=checks)
    if response.status_code >= HTTPStatus.BAD_REQUEST:
        assert len(response.content) < MAX_ANSWER
        if case.path.startswith("/api/"):
            assert isinstance(response.json()["error"], str)
            return
        fields = {"type"} if case.path in (MESSAGES, COUNT) else {"type", "param", "code"}
        assert {"message"} | fields <= set(response.json()["error"])


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(
    server: Server, label: str, num_examples: int
) -> None:
    @examples(num_examples)
    @given(operation(server, label).as_strategy(generation_mode=GenerationMode.POSITIVE))
    def try_one(case: Case[Any]) -> None:
        check(case)

    try_one()


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("label", weekly(WITH_BODY, 6))
def test_what_the_document_forbids_is_rejected_as_it_says(
    server: Server, label: str, num_examples: int
) -> None:
    @examples(num_examples)
    @given(operation(server, label).as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def try_one(case: Case[Any]) -> None:
        check(case)

    try_one()


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("label", weekly([f"POST {path}" for path in SERVED], 6))
def test_any_fields_beside_a_good_request_are_answered_as_the_document_says(
    server: Server, label: str, num_examples: int
) -> None:
    """All fields together are nearly always rejected for one of them; of a few, many are served."""
    made = operation(server, label)

    @examples(num_examples)
    @given(
        made.as_strategy(generation_mode=GenerationMode.POSITIVE), st.integers(1, 3), st.integers()
    )
    def try_one(case: Case[Any], num_fields: int, choice: int) -> None:
        good = SERVED[made.path]
        body: Any = case.body if isinstance(case.body, dict) else {}
        others = sorted(set(body) - set(good))
        names = Random(choice).sample(others, min(num_fields, len(others)))
        case.body = good | {name: body[name] for name in names}
        check(case)

    try_one()


def test_the_document_has_all_operations_and_no_answer_that_is_never_sent(server: Server) -> None:
    host, port = server.address()
    document = httpx.get(f"http://{host}:{port}/openapi.json").json()
    found = {
        f"{method.upper()} {path}": described
        for path, methods in document["paths"].items()
        for method, described in methods.items()
    }
    assert set(found) == set(OPERATIONS)
    for operation_name, described in found.items():
        is_anthropic = operation_name in (f"POST {MESSAGES}", f"POST {COUNT}")
        envelope = "AnthropicError" if is_anthropic else "ErrorEnvelope"
        if " /api/" in operation_name:
            envelope = "OllamaError"
        assert "422" not in described["responses"]
        for status, response in described["responses"].items():
            if status != "200":
                reported = response["content"]["application/json"]["schema"]["$ref"]
                assert reported == f"#/components/schemas/{envelope}"
    assert json.dumps(document).count("HTTPValidationError") == 0
