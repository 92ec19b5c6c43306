"""Files over HTTP: what is taken, whose they are, and that no part of one is left."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest
from openai.types import FileDeleted, FileObject
from pydantic import SecretStr
from starlette.types import Message

from app.storage.disk.database import StorageError
from app.storage.files import FileLimits, FileStore
from tests.support.batches import BATCHES, CHAT, FILES, create, full_disk, served_in, upload
from tests.support.rows import rows
from tests.support.sdk_types import check_shape
from tests.support.speaker import Served, served

pytestmark = pytest.mark.anyio

MIB: Final = 1 << 20
FORM: Final = "multipart/form-data; boundary=x"


def part(name: str, content: bytes = b"batch", *, filename: str | None = None) -> bytes:
    shown = "" if filename is None else f'; filename="{filename}"'
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END: Final = b"--x--\r\n"
FILE: Final = part("file", b"{}\n", filename="in.jsonl")
PURPOSE: Final = part("purpose")


async def post(server: Served, body: bytes, content_type: str = FORM) -> Any:
    return await server.client.post(FILES, content=body, headers={"Content-Type": content_type})


async def refused(server: Served, body: bytes, content_type: str = FORM) -> str:
    answer = await post(server, body, content_type)
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "batches" / "files").iterdir())


async def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000
    async with served_in(tmp_path) as server:
        answer = await server.client.post(
            FILES, data={"purpose": "batch"}, files={"file": ("../../etc/passwd", content)}
        )
        file = answer.json()
        check_shape(file, FileObject)
        assert (file["bytes"], file["purpose"], file["status"]) == (
            len(content),
            "batch",
            "processed",
        )
        assert file["filename"] == "../../etc/passwd"
        assert left_in(tmp_path) == [file["id"]]
        assert (await server.client.get(f"{FILES}/{file['id']}")).json() == file
        whole = await server.client.get(f"{FILES}/{file['id']}/content")
        assert whole.content == content
        deleted = await server.client.delete(f"{FILES}/{file['id']}")
        check_shape(deleted.json(), FileDeleted)
        assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
        for path in (FILES + "/" + file["id"], f"{FILES}/{file['id']}/content"):
            assert (await server.client.get(path)).status_code == 404
        assert (await server.client.delete(f"{FILES}/{file['id']}")).status_code == 404
        assert left_in(tmp_path) == []


async def test_the_purpose_may_come_before_the_file_or_after() -> None:
    async with served() as server:
        for body in (PURPOSE + FILE + END, FILE + PURPOSE + END):
            assert (await post(server, body)).status_code == 200


async def test_a_file_without_a_name_has_one() -> None:
    async with served() as server:
        answer = await post(server, part("file", b"x") + PURPOSE + END)
        assert answer.json()["filename"] == "file"


async def test_files_are_listed_in_pages() -> None:
    async with served() as server:
        assert (await server.client.get(FILES)).json() == {
            "object": "list",
            "data": [],
            "first_id": "",
            "last_id": "",
            "has_more": False,
        }
        ids = [(await upload(server, [{}]))["id"] for _ in range(5)]

        async def listed(query: str) -> tuple[list[str], bool]:
            page = (await server.client.get(f"{FILES}?{query}")).json()
            found = [file["id"] for file in page["data"]]
            assert (page["first_id"], page["last_id"]) == (found[0], found[-1])
            return found, page["has_more"]

        assert await listed("") == (ids[::-1], False)
        assert await listed("order=asc&limit=2") == (ids[:2], True)
        assert await listed(f"order=asc&limit=2&after={ids[1]}") == (ids[2:4], True)
        assert await listed(f"limit=3&after={ids[3]}") == (ids[2::-1], False)
        assert await listed("purpose=batch&limit=5") == (ids[::-1], False)
        others = await server.client.get(f"{FILES}?purpose=batch_output")
        assert others.json()["data"] == []
        unknown = await server.client.get(f"{FILES}?after=file-x")
        assert unknown.json()["error"]["param"] == "after"


async def test_another_keys_files_are_not_there() -> None:
    async with served(api_keys=SecretStr("one,two")) as server:
        file = await upload(server, [{}], key="one")
        two = {"Authorization": "Bearer two"}
        for method in ("GET", "DELETE"):
            answer = await server.client.request(method, f"{FILES}/{file['id']}", headers=two)
            assert answer.status_code == 404
        content = await server.client.get(f"{FILES}/{file['id']}/content", headers=two)
        assert content.status_code == 404
        assert (await server.client.get(FILES, headers=two)).json()["data"] == []
        after = await server.client.get(f"{FILES}?after={file['id']}", headers=two)
        assert after.status_code == 400
        one = await server.client.get(FILES, headers={"Authorization": "Bearer one"})
        assert len(one.json()["data"]) == 1


async def test_what_is_no_form_is_refused(tmp_path: Path) -> None:
    async with served_in(tmp_path) as server:
        assert "multipart/form-data" in await refused(server, b"{}", "application/json")
        assert "multipart/form-data" in await refused(server, b"{}", "multipart/form-data")
        assert "boundary" in await refused(
            server, b"", f"multipart/form-data; boundary={'x' * 300}"
        )
        assert "malformed" in await refused(server, b"nothing")
        assert "not complete" in await refused(server, PURPOSE + FILE)
        assert "no file" in await refused(server, PURPOSE + END)
        assert "several files" in await refused(server, FILE + FILE + END)
        assert "more than 4096 bytes" in await refused(server, part("a", b"x" * 5000) + END)
        assert "more than 64 parts" in await refused(server, PURPOSE * 65 + END)
        assert "'batch'" in await refused(server, FILE + END)
        assert "'batch'" in await refused(server, FILE + part("purpose", b"evals") + END)
        assert left_in(tmp_path) == []


@rows(
    ("fields", "word"),
    [
        ({"expires_after[seconds]": b"7200"}, "anchor"),
        ({"expires_after[anchor]": b"created_at", "expires_after[seconds]": b"9"}, "3600"),
        ({"expires_after[anchor]": b"created_at", "expires_after[seconds]": b"x"}, "3600"),
        ({"expires_after[anchor]": b"created_at", "expires_after[seconds]": b"9" * 99}, "3600"),
    ],
)
async def test_an_expiry_that_there_is_not_is_refused(fields: dict[str, bytes], word: str) -> None:
    given = b"".join(part(name, value) for name, value in fields.items())
    async with served() as server:
        assert word in await refused(server, given + PURPOSE + FILE + END)


async def test_a_file_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    async with served_in(tmp_path) as server:
        kept = await upload(server, [{}])
        file = await upload(server, [{}], **expiry)
        assert file["expires_at"] == file["created_at"] + 3600
        monkeypatch.setattr(server.service.storage.batch.files, "_clock", lambda: 1e12)
        assert (await server.client.get(f"{FILES}/{file['id']}")).status_code == 404
        listed = (await server.client.get(FILES)).json()["data"]
        assert [each["id"] for each in listed] == [kept["id"]]
        for _ in range(5):
            server.service.tick(0.0, 0.0)
        await server.service.batches.idle()
    assert left_in(tmp_path) == [kept["id"]]


async def test_a_file_that_is_too_large_is_refused_by_the_limits_setting(tmp_path: Path) -> None:
    limits = FileLimits(max_file_bytes=MIB, max_owner_bytes=10 * MIB)
    async with served_in(tmp_path, limits=limits, max_file_mib=1) as server:

        async def streamed() -> AsyncIterator[bytes]:
            yield PURPOSE + part("file", b"")[:-2]
            for _ in range(80):
                yield b"x" * (MIB // 16)

        declared = await post(server, PURPOSE + part("file", b"x" * 3 * MIB) + END)
        chunked = await server.client.post(
            FILES, content=streamed(), headers={"Content-Type": FORM}
        )
        whole = await post(server, PURPOSE + part("file", b"x" * MIB) + END)
    for answer in (declared, chunked):
        assert answer.status_code == 413
        message = answer.json()["error"]["message"]
        assert message == "the file is larger than the limit of 1 MiB (MLX_SERVER_MAX_FILE_MIB)"
    assert left_in(tmp_path) == [whole.json()["id"]]


async def test_all_files_together_have_a_limit(tmp_path: Path) -> None:
    limits = FileLimits(max_file_bytes=MIB, max_owner_bytes=2 * MIB)
    form = PURPOSE + part("file", b"x" * MIB) + END
    async with served_in(tmp_path, limits=limits, max_files_mib=2) as server:
        first, second, third = [await post(server, form) for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 413)
        assert "2 MiB (MLX_SERVER_MAX_FILES_MIB)" in third.json()["error"]["message"]
        fields = {"input_file_id": first.json()["id"], "endpoint": CHAT}
        assert (await server.client.post(BATCHES, json=fields)).status_code == 413
        await server.client.delete(f"{FILES}/{first.json()['id']}")
        assert (await post(server, form)).status_code == 200


async def test_a_full_disk_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served_in(tmp_path) as server:
        with full_disk(1000):
            answer = await post(server, PURPOSE + part("file", b"x" * 2000) + END)
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert message == "files cannot be stored at present: File too large"
        assert "an upload is not stored: [Errno 27] File too large" in caplog.text
        assert left_in(tmp_path) == []
        assert (await post(server, PURPOSE + FILE + END)).status_code == 200


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (FileNotFoundError(2, "No usable directory in ['/home/u']"), "No such file or directory"),
        (StorageError("/home/u/batches.sqlite: database or disk is full"), "the disk fails"),
    ],
)
async def test_the_log_says_why_an_upload_is_not_stored_and_the_client_sees_no_path(
    error: OSError,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(FileStore, "begin", fail)
    async with served_in(tmp_path) as server:
        answer = await post(server, PURPOSE + FILE + END)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == f"files cannot be stored at present: {shown}"
    assert f"an upload is not stored: {error}" in caplog.text


async def test_a_file_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    async with served_in(tmp_path, is_gated=True) as server:
        file = await upload(server, [{}])
        server.service.batches.wake = lambda: None  # type: ignore[method-assign]
        await create(server, file["id"])
        answer = await server.client.delete(f"{FILES}/{file['id']}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file_id")


async def call(
    server: Served, receive: Callable[[], Awaitable[Message]], *headers: tuple[bytes, bytes]
) -> list[Message]:
    """Send an upload by hand; return what was sent back."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": FILES,
        "raw_path": FILES.encode(),
        "query_string": b"",
        "headers": [(b"content-type", FORM.encode()), *headers],
        "client": None,
        "server": None,
        "http_version": "1.1",
        "scheme": "http",
    }
    await server.app(scope, receive, send)
    return sent


LENGTH: Final = (b"content-length", b"1000")


async def test_a_client_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    messages: list[Message] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": PURPOSE + FILE, "more_body": True},
    ]

    async def receive() -> Message:
        return messages.pop()

    async with served_in(tmp_path) as server:
        sent = await call(server, receive, LENGTH)
        assert sent[0]["status"] == 499
    assert left_in(tmp_path) == []


async def test_no_more_than_a_little_of_an_upload_waits_in_memory(tmp_path: Path) -> None:
    """Every connection may have one that stalls."""
    stalled_at: list[int] = []
    pieces = [PURPOSE + part("file", b"")[:-2], *[b"x" * (MIB // 64)] * 20]

    async def receive() -> Message:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": True}
        (draft,) = (tmp_path / "batches" / "files").iterdir()
        stalled_at.append(draft.stat().st_size)
        return {"type": "http.disconnect"}

    async with served_in(tmp_path) as server:
        await call(server, receive, LENGTH)
    assert stalled_at[0] > 20 * MIB // 64 - MIB // 8


async def test_a_client_that_sends_nothing_more_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http.body_limit.LINGER_SECONDS", 0.0)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with served_in(tmp_path, read_timeout=0.01) as server:
        sent = await call(server, receive, LENGTH)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert [message.get("more_body", False) for message in sent[1:]] == [True, False]
    assert left_in(tmp_path) == []
