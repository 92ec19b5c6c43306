"""`/v1/files`: the inputs of batches, and their results."""

from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse

from app.api.openai.files.schemas import UPLOAD_FORM, DeletedFile, FileList, FileObject
from app.api.openai.files.upload import receive_file
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import client_of, written
from app.http.errors.rejections import NotFound
from app.http.errors.responses import CLIENT_CLOSED_REQUEST
from app.server_state import server_state
from app.storage.disk.in_thread import in_thread
from app.storage.files import StoredFile
from batching import InvalidRequest

PATH: Final = "/v1/files"

router = APIRouter(responses=ERROR_RESPONSES)

_BINARY: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}


@router.post(PATH, response_model=FileObject, openapi_extra=UPLOAD_FORM)
async def upload_file(request: Request) -> Response:
    """Store a file, whose requests a batch will serve."""
    try:
        stored = await receive_file(request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(FileObject.of(stored).model_dump_json(), media_type="application/json")


@router.get(PATH, response_model=FileList)
async def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """List the client's files, the newest first."""
    owner, files = client_of(request).key_digest, server_state(request).storage.batch.files
    if after is not None and await in_thread(partial(files.get, owner, after)) is None:
        raise InvalidRequest("after", "there is no file with this id")
    page = partial(files.page, owner, after=after, limit=limit, order=order, purpose=purpose)
    # With the most files it is as much as 17 MB.
    body = await written(request, lambda: FileList.of(page()).model_dump_json())
    return Response(body, media_type="application/json")


@router.get(f"{PATH}/{{file_id}}")
async def get_file(file_id: str, request: Request) -> FileObject:
    """Describe a file."""
    return FileObject.of(await own_file(request, file_id))


@router.delete(f"{PATH}/{{file_id}}")
async def delete_file(file_id: str, request: Request) -> DeletedFile:
    """Delete a file, unless a batch that has not ended reads it."""
    file, storage = await own_file(request, file_id), server_state(request).storage.batch
    if await in_thread(partial(storage.batches.is_input, file_id)):
        raise InvalidRequest("file_id", "a batch that has not ended reads this file")
    await in_thread(partial(storage.files.delete, file.owner, file_id))
    return DeletedFile(id=file_id)


@router.get(f"{PATH}/{{file_id}}/content", response_class=Response, responses=_BINARY)
async def get_content(file_id: str, request: Request) -> Response:
    """Return the bytes of a file."""
    file = await own_file(request, file_id)
    path = server_state(request).storage.batch.files.path(file_id)
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def own_file(request: Request, file_id: str) -> StoredFile:
    """Return a file of the client.

    Raises:
        NotFound: the client has none with this id.
    """
    files = server_state(request).storage.batch.files
    found = await in_thread(partial(files.get, client_of(request).key_digest, file_id))
    if found is None:
        raise NotFound(f"No such File object: {file_id}")
    return found
