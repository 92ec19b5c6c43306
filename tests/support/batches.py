"""Files and batches of a server in a test: what is sent, and what comes back."""

import json
import resource
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Final

from app.storage.batch_storage import DEFAULT_LIMITS
from app.storage.files import FileLimits
from app.storage.responses.limits import StoreLimits
from app.storage.storage import open_folder
from tests.support.speaker import MODEL_ID, Served, served

CHAT: Final = "/v1/chat/completions"
FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"


def chat_line(custom_id: str, content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def chat_lines(num_lines: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{i}") for i in range(num_lines)]


def json_lines(lines: Sequence[Any]) -> bytes:
    """Return the text of lines, of which those that are bytes are as they are."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


async def upload(server: Served, lines: Sequence[Any], key: str = "", **fields: str) -> Any:
    answer = await server.client.post(
        FILES,
        data={"purpose": "batch", **fields},
        files={"file": ("in.jsonl", json_lines(lines))},
        headers=_headers(key),
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def create(server: Served, file_id: str, key: str = "", **fields: Any) -> Any:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = await server.client.post(BATCHES, json=body, headers=_headers(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ended(server: Served, batch_id: str, key: str = "") -> Any:
    """Wait until nothing runs; return the batch."""
    await server.service.batches.idle()
    answer = await server.client.get(f"{BATCHES}/{batch_id}", headers=_headers(key))
    return answer.json()


async def run(server: Served, lines: Sequence[Any], **fields: Any) -> Any:
    """Run a batch to its end; return it."""
    file = await upload(server, lines)
    batch = await create(server, file["id"], **fields)
    return await ended(server, batch["id"])


async def records(server: Served, file_id: str, key: str = "") -> list[Any]:
    """Return the lines of a file of a batch."""
    answer = await server.client.get(f"{FILES}/{file_id}/content", headers=_headers(key))
    assert answer.status_code == 200
    return [json.loads(line) for line in answer.text.split("\n") if line]


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def served_in(
    folder: Path,
    answer: Sequence[int] | None = b"Hello!",
    *,
    limits: FileLimits = DEFAULT_LIMITS,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve a speaker that keeps its files in a folder; its batches end with the block."""
    stored = open_folder(folder, StoreLimits(), keeps_responses=False, files=limits)
    with closing(stored) as storage:
        async with served(answer, storage=storage, **options) as server:
            try:
                yield server
            finally:
                await server.service.batches.close()


@contextmanager
def full_disk(num_bytes: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
