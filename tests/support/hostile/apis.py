"""The APIs that a hostile client asks, and a short request of each."""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from app.api.anthropic.request import MessagesRequest
from app.api.llama_cpp.request import InfillRequest
from app.api.ollama.request import ChatRequest, GenerateRequest
from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.completions.request import CompletionRequest
from app.api.openai.conversations.schemas import ConversationCreation
from app.api.openai.decisions.request import DecisionRequest
from app.api.openai.responses.request import ResponseRequest
from app.api.systemone.request import SystemOneRequest
from tests.support.hostile.wire import post

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RENDER: Final = "/v1/chat/completions/render"
MESSAGES: Final = "/v1/messages"
COUNT: Final = "/v1/messages/count_tokens"
RESPONSES: Final = "/v1/responses"
COMPACT: Final = "/v1/responses/compact"
CONVERSATIONS: Final = "/v1/conversations"
DECISIONS: Final = "/v1/decisions"
SYSTEM_ONE: Final = "/v1/systemone"
INFILL: Final = "/infill"
OLLAMA_CHAT: Final = "/api/chat"
GENERATE: Final = "/api/generate"

REQUESTS: Final[dict[str, type[BaseModel]]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    MESSAGES: MessagesRequest,
    RESPONSES: ResponseRequest,
    COMPACT: ResponseRequest,
    CONVERSATIONS: ConversationCreation,
    DECISIONS: DecisionRequest,
    SYSTEM_ONE: SystemOneRequest,
    INFILL: InfillRequest,
    OLLAMA_CHAT: ChatRequest,
    GENERATE: GenerateRequest,
}

# It stands in the prompts, and in no answer.
SECRET: Final = "marmalade-4711"

# A quarter of what the server takes, beyond which only strings may go on: the whole takes four times as long.
NUM_BYTES: Final = 8 << 20

# A request of each API, without a limit of the output.
SHORT: Final = {
    CHAT: json.dumps({"messages": [{"role": "user", "content": SECRET}]}).encode(),
    COMPLETIONS: json.dumps({"prompt": SECRET}).encode(),
    MESSAGES: json.dumps(
        {"max_tokens": 1, "messages": [{"role": "user", "content": SECRET}]}
    ).encode(),
    RESPONSES: json.dumps({"input": SECRET}).encode(),
    COMPACT: json.dumps({"input": SECRET, "max_output_tokens": 1}).encode(),
    CONVERSATIONS: json.dumps({"items": [{"role": "user", "content": SECRET}]}).encode(),
    DECISIONS: json.dumps(
        {"input": SECRET, "questions": [{"type": "predicate", "instructions": "Is it jam?"}]}
    ).encode(),
    SYSTEM_ONE: json.dumps(
        {"state": SECRET, "questions": {"a": {"type": "noul", "instructions": "Is it jam?"}}}
    ).encode(),
    INFILL: json.dumps({"input_prefix": SECRET, "input_suffix": "b", "n_predict": 1}).encode(),
    OLLAMA_CHAT: json.dumps({"messages": [{"role": "user", "content": SECRET}]}).encode(),
    GENERATE: json.dumps({"prompt": SECRET}).encode(),
}

# A body is made when it is sent: some are large.
Body = Callable[[], bytes]


class Attack(NamedTuple):
    path: str
    body: Body
    content_type: str = "application/json"

    def request(self) -> bytes:
        return post(self.path, self.body(), self.content_type)


Attacks = dict[str, Attack]


def to(path: str, bodies: dict[str, Body]) -> Attacks:
    """Return bodies for a path, under names that begin with it."""
    return {f"{path}: {name}": Attack(path, body) for name, body in bodies.items()}


def chat(content: Any = SECRET, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"messages": messages, "max_tokens": 1} | fields).encode()


def chatting(content: Any = SECRET, **fields: Any) -> Body:
    return lambda: chat(content, **fields)


def with_field(body: bytes, field: str, value: str) -> bytes:
    """Return a request with a field that json does not write so."""
    return body[:-1] + f", {json.dumps(field)}: {value}}}".encode()


def chat_with(field: str, value: str) -> bytes:
    return with_field(chat(), field, value)


def tool(**fields: Any) -> dict[str, Any]:
    """Return a tool of the Chat Completions API."""
    return {"type": "function", "function": {"name": "f"} | fields}


def complete(**fields: Any) -> bytes:
    return json.dumps({"prompt": SECRET, "max_tokens": 1} | fields).encode()


def message(content: Any = SECRET, **fields: Any) -> bytes:
    """Return a request of Anthropic's API."""
    return chat(content, **fields)


def ask(input_: Any = SECRET, **fields: Any) -> bytes:
    """Return a request of the Responses API."""
    return json.dumps({"input": input_, "max_output_tokens": 1} | fields).encode()


def part(**fields: Any) -> dict[str, Any]:
    """Return an item of the Responses API with one part."""
    return {"role": "user", "content": [{"type": "input_text", "text": "a"} | fields]}


def asking(input_: Any = SECRET, **fields: Any) -> Body:
    return lambda: ask(input_, **fields)


def items(*given: Any) -> Body:
    return asking([*given, {"role": "user", "content": SECRET}])


def filled(before: str, unit: str, after: str) -> bytes:
    """Return as many units as a body may have."""
    count = (NUM_BYTES - len(before) - len(after)) // len(unit.encode())
    return (before + unit * count + after).encode()


def nested(depth: int, value: str = "1") -> str:
    return "[" * depth + value + "]" * depth
