"""The chunks of a streamed response."""

import json
from typing import Any

import httpx


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1] if not line.startswith(":")]
