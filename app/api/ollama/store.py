"""`POST /api/pull` and `DELETE /api/delete`: the hub's cache of this machine, for operators."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, TypeVar

import anyio.to_thread
from fastapi import Request, Response
from huggingface_hub.utils.tqdm import disable_progress_bars
from pydantic import BaseModel, Field

from app.api.ollama.names import known_name
from app.api.ollama.response import LINE_RESPONSES
from app.api.ollama.route import new_router
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Text
from app.api.serving import check_admin, client_of
from app.api.sse import LineStream
from app.http.errors.rejections import NotFound
from app.server_state import server_state
from app.store.download import bytes_to_fetch, check_space, delete, download, verify
from app.store.errors import CommandError
from app.store.hub import ask
from app.worker_threads import WorkerThreads
from batching import InvalidRequest, ModelState

T = TypeVar("T")

router = new_router()

# Seconds between two reports of a download.
INTERVAL: Final = 1.0
# A download goes on if its client leaves: what has arrived is kept.
_THREADS: Final = WorkerThreads(2)


class StoredModel(RequestModel):
    model: Text = Field(default="", description="Or `name`.")
    name: Text = ""


class PullRequest(StoredModel):
    stream: bool = True


class Progress(BaseModel):
    """A line of a stream; bytes are those of all files."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


@router.post("/api/pull", response_model=Progress, responses=LINE_RESPONSES)
async def pull(body: PullRequest, request: Request) -> Response:
    """Download a model of the hub into its cache, or what is missing of it, and check it.

    Raises:
        Forbidden: the key is not one of an admin.
        InvalidRequest: the hub does not give it, or there is no room.
    """
    check_admin(request)
    reports = _pulled(body.model or body.name, client_of(request).name)
    if body.stream:
        return LineStream(_lines(reports), lambda: _line({"status": "pulling"}))
    try:
        async for report in reports:
            last = report
    except CommandError as error:
        raise InvalidRequest("model", str(error)) from None
    return Response(_line(last), media_type="application/json")


@router.delete("/api/delete")
async def remove(body: StoredModel, request: Request) -> Response:
    """Delete a model from the hub's cache.

    Raises:
        Forbidden: the key is not one of an admin.
        NotFound: it is not there.
        InvalidRequest: it is loaded.
    """
    check_admin(request)
    manager = server_state(request).manager
    name = known_name(manager, body.model or body.name)
    for status in manager.statuses():
        if name in (status.model_id, status.model.config.model):
            name = status.model.config.model
            if status.state not in (ModelState.UNLOADED, ModelState.FAILED):
                message = f"the model '{status.model_id}' is loaded: unload it first"
                raise InvalidRequest("model", message)
    try:
        await _run(partial(delete, name), client_of(request).name)
    except CommandError as error:
        raise NotFound(str(error)) from None
    return Response()


async def _pulled(repo_id: str, key: str) -> AsyncIterator[dict[str, Any]]:
    """Yield what has become of a download so far.

    Raises:
        CommandError: it has failed.
    """
    yield {"status": "pulling manifest"}
    disable_progress_bars()
    repository = await _run(partial(ask, repo_id), key)
    await _run(lambda: check_space(bytes_to_fetch(repository)), key)
    loading = asyncio.ensure_future(_run(partial(download, repository), key))
    try:
        is_over = False
        while not is_over:
            is_over = bool((await asyncio.wait([loading], timeout=INTERVAL))[0])
            # Not in the threads of downloads, which other downloads may have.
            num_missing = await anyio.to_thread.run_sync(bytes_to_fetch, repository)
            yield {
                "status": f"pulling {repository.commit[:12]}",
                "digest": repository.commit,
                "total": repository.size,
                "completed": repository.size - num_missing,
            }
        loading.result()
    finally:
        loading.cancel()
    yield {"status": "verifying sha256 digest"}
    await _run(partial(verify, repository), key)
    yield {"status": "success"}


async def _lines(reports: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for report in reports:
            yield _line(report)
    except CommandError as error:
        yield _line({"error": str(error)})


async def _run(function: Callable[[], T], key: str) -> T:
    return await _THREADS.run(function, key)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
