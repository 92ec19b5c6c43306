"""What every rejection is: a short error in the envelope of its path, which tells nothing."""

import json
import re
from typing import Final

from tests.support.hostile.apis import CHAT, COUNT, MESSAGES, SECRET
from tests.support.hostile.wire import Answer

MAX_ANSWER: Final = 2048
ERROR_TYPES: Final = {"invalid_request_error", "timeout_error"}
ANTHROPIC_ERROR_TYPES: Final = ERROR_TYPES | {"not_found_error", "request_too_large"}
# What tells of this machine or this program.
INSIDE: Final = re.compile(
    rb"Traceback|File \\?\"|site-packages|\.py\b|/(home|root|tmp|usr|opt|var)/|0x[0-9a-f]{6}|object at"
)


def check_rejected(answer: Answer, *others: int, path: str = CHAT) -> None:
    """Fail unless a request was rejected in the envelope of its path; `others` are statuses beside 4xx."""
    assert 400 <= answer.status < 500 or answer.status in others, answer
    assert answer.content_type == "application/json"
    assert len(answer.body) < MAX_ANSWER
    body = json.loads(answer.body)
    error = body["error"]
    if path.startswith("/api/"):
        assert body.keys() == {"error"}
        error = {"message": error}
    elif path in (MESSAGES, COUNT):
        assert body.keys() == {"type", "error", "request_id"}
        assert (body["type"], error.keys()) == ("error", {"type", "message"})
        assert error["type"] in ANTHROPIC_ERROR_TYPES
    else:
        assert {"message", "type", "param", "code"} <= set(error)
        assert error["type"] in ERROR_TYPES
    assert error["message"]
    assert not INSIDE.search(answer.body), answer.body
    assert SECRET.encode() not in answer.body
