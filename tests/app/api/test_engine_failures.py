"""An engine that fails: every API says so in its own form, and what it has begun ends; so does a body that is too large."""

import json
from typing import Any, Final

import pytest

from batching.pooling import Embeddings, PoolingType
from tests.support.fill_in import QWEN, Marked
from tests.support.speaker import MODEL_ID, Breaking, Served, served

pytestmark = pytest.mark.anyio

TURNS: Final = [{"role": "user", "content": "Hi"}]
PREDICATE: Final = {"type": "predicate", "instructions": "Is it?"}
NOUL: Final = {"type": "noul", "instructions": "Is it?"}
STREAMED: Final[dict[str, dict[str, Any]]] = {
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/chat": {"messages": TURNS},
    "/api/generate": {"prompt": "Hi"},
}
WHOLE: Final[dict[str, dict[str, Any]]] = {
    "/api/embed": {"input": "Hi"},
    "/v1/decisions": {"input": "Hi", "questions": [PREDICATE]},
    "/v1/systemone": {"state": "Hi", "questions": {"a": NOUL}},
    "/v1/responses/compact": {"input": "Hi"},
}
PATHS: Final = STREAMED | WHOLE


def breaking(said: bytes) -> Any:
    """Serve a model that fails behind what it says."""
    return served(
        said,
        runner=Breaking,
        tokenizer=Marked(*QWEN),
        embeddings=Embeddings(pooling=PoolingType.LAST, size=4),
    )


async def ask(server: Served, path: str, **fields: Any) -> Any:
    return await server.post(path, {"model": MODEL_ID} | PATHS[path] | fields)


def message_of(path: str, error: Any) -> str:
    """Return the message of an error; Ollama's is a text."""
    assert error.keys() == {"error"}
    found = error["error"]
    if not path.startswith("/api/"):
        assert found.keys() == {"message", "type", "param", "code"}
        found = found["message"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_that_fails_is_an_error(path: str) -> None:
    async with breaking(b"") as server:
        response = await ask(server, path, stream=False)
        assert await server.num_unfinished() == 0
        assert server.service.admission.num_requests == 0
    assert response.status_code == 500
    assert "out of memory" not in message_of(path, response.json())


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_that_fails_ends_with_an_error(path: str) -> None:
    async with breaking(b"xyz") as server:
        response = await ask(server, path, stream=True)
        assert await server.num_unfinished() == 0
        assert server.service.admission.num_requests == 0
    assert response.status_code == 200
    lines = filter(None, response.text.splitlines())
    *parts, last = (json.loads(line.removeprefix("data: ")) for line in lines)
    texts = [part.get("content") or part.get("response") or part.get("message") for part in parts]
    assert "".join(t["content"] if isinstance(t, dict) else t for t in texts) == "xyz"
    assert "out of memory" not in message_of(path, last)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_too_large_is_an_error(path: str) -> None:
    async with served(max_body_bytes=1000) as server:
        response = await ask(server, path, user="x" * 1000)
    assert response.status_code == 413
    assert "1000" in message_of(path, response.json())
