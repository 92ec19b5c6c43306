"""What is sent of a line."""

import json
from typing import Any

import pytest

from app.batches.lines import BadLine, Line
from app.warming.lines import warming_body
from tests.support.rows import rows

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SHORT = {**CHAT, "max_tokens": 1, "stream": False}


def body_of(fields: Any, max_bytes: int = 1000) -> dict[str, Any]:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return warming_body(Line(1, text), max_bytes)


@rows(
    ("line", "body"),
    [
        (CHAT, SHORT),
        ({"body": CHAT}, SHORT),
        ({"custom_id": "a", "url": "/v1/chat/completions", "body": CHAT}, SHORT),
        (
            {**CHAT, "model": "toy", "tools": [], "max_tokens": 9, "stream": True, "n": 4},
            {**SHORT, "model": "toy", "tools": []},
        ),
        ({**CHAT, "max_completion_tokens": 9, "min_tokens": 5, "stream_options": {}}, SHORT),
        ({**CHAT, "n_predict": -1}, SHORT),
    ],
)
def test_the_prompt_of_a_line_is_sent_with_one_token_of_output(
    line: Any, body: dict[str, Any]
) -> None:
    assert body_of(line) == body


@rows(
    ("line", "reason"),
    [
        (b"{", "this is not JSON: Expecting property name enclosed in double quotes"),
        ([], "this is not a JSON object"),
        ({"body": 5}, "body must be an object"),
        ({"url": "/v1/embeddings", "body": {}}, "url must be /v1/chat/completions"),
    ],
)
def test_a_line_without_a_chat_request_is_bad(line: Any, reason: str) -> None:
    with pytest.raises(BadLine) as bad:
        body_of(line)
    assert str(bad.value) == reason


def test_a_line_that_was_too_long_to_be_read_is_bad() -> None:
    with pytest.raises(BadLine, match="the line is longer than 9 bytes"):
        warming_body(Line(1, None), 9)
