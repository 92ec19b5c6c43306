"""Batches over HTTP, with a fake model at the lowest edge."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from openai.types import Batch
from pydantic import SecretStr

from app.batches.batch_run import BatchRun
from app.batches.validation import validate
from app.storage.batches import FINAL, StoredBatch
from app.storage.disk.in_thread import Pieces
from app.storage.files import FileLimits
from batching.batch_inference import BatchInferenceEngine
from batching.pooling import NO_EMBEDDINGS, Embeddings, PoolingType
from batching.request import BatchRequest
from tests.support.batches import (
    BATCHES,
    CHAT,
    FILES,
    chat_line,
    chat_lines,
    create,
    ended,
    full_disk,
    records,
    run,
    served_in,
    upload,
)
from tests.support.conversations import begin, texts_of
from tests.support.rows import rows
from tests.support.sdk_types import check_shape
from tests.support.speaker import Breaking, Served, served

pytestmark = pytest.mark.anyio

STATUS_FIELDS: Final = ("in_progress_at", "finalizing_at", "completed_at")


async def test_a_batch_is_served() -> None:
    async with served(b"Hello!") as server:
        file = await upload(server, chat_lines(20))
        begun = await create(server, file["id"], metadata={"a": "b"})
        check_shape(begun, Batch)
        assert begun["status"] == "validating"
        assert begun["expires_at"] == begun["created_at"] + 86_400
        done = await ended(server, begun["id"])
        found = await records(server, done["output_file_id"])
        output = (await server.client.get(f"{FILES}/{done['output_file_id']}")).json()
        page = (await server.client.get("/metrics")).text
    check_shape(done, Batch)
    assert done["status"] == "completed"
    assert done["metadata"] == {"a": "b"}
    assert done["error_file_id"] is None
    assert done["errors"] is None
    assert all(done[field] is not None for field in STATUS_FIELDS)
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert (output["purpose"], output["filename"]) == (
        "batch_output",
        f"{begun['id']}_output.jsonl",
    )
    assert [record["custom_id"] for record in found] == [f"id-{i}" for i in range(20)]
    assert len({record["id"] for record in found}) == 20
    for record in found:
        response = record["response"]
        assert record["error"] is None
        assert response["status_code"] == 200
        assert response["request_id"] == record["id"]
        assert response["body"]["choices"][0]["message"]["content"] == "Hello!"
    assert (
        'mlx_server:batch_lines_total{model_name="fake/speaker",outcome="completed"} 20.0' in page
    )
    assert 'mlx_server:num_batches_running{model_name="fake/speaker"} 0.0' in page


@pytest.mark.parametrize(
    ("url", "body", "path"),
    [
        ("/v1/completions", {"prompt": "Hi"}, ("choices", 0, "text")),
        ("/v1/responses", {"input": "Hi"}, ("output", 0, "content", 0, "text")),
    ],
)
async def test_other_endpoints(url: str, body: Any, path: tuple[Any, ...]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    async with served(b"Hello!") as server:
        done = await run(server, [line], endpoint=url)
        (found,) = await records(server, done["output_file_id"])
    value = found["response"]["body"]
    for key in path:
        value = value[key]
    assert value == "Hello!"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/embeddings", {"input": ["Hi", "you"]}),
        ("/v1/score", {"text_1": "Hi", "text_2": "you"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["you", "me"]}),
    ],
)
async def test_lines_that_ask_for_no_text(url: str, body: Any) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    async with served(embeddings=Embeddings(pooling=PoolingType.LAST, size=4)) as server:
        answer = await server.post(url, body)
        done = await run(server, [line], endpoint=url)
        (found,) = await records(server, done["output_file_id"])
        page = (await server.client.get("/metrics")).text
    response, expected = found["response"]["body"], answer.json()
    for key in ("data", "results"):
        assert response.get(key) == expected.get(key)
    assert (
        'mlx_server:queue_wait_seconds_count{model_name="fake/speaker",priority="low"} 0.0'
        not in page
    )


async def test_lines_of_one_conversation_take_turns() -> None:
    url = "/v1/responses"
    async with served(b"Hello!") as server:
        conversation_id = await begin(server)
        bodies = [{"input": f"{n}", "conversation": conversation_id} for n in range(10)]
        lines = [
            {"custom_id": body["input"], "method": "POST", "url": url, "body": body}
            for body in bodies
        ]
        done = await run(server, lines, endpoint=url)
        texts = await texts_of(server, conversation_id)
    assert done["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
    assert sorted(texts[::2], key=int) == [body["input"] for body in bodies]
    assert texts[1::2] == ["Hello!"] * 10


async def test_responses_of_lines_are_stored_only_if_that_is_asked_for() -> None:
    url = "/v1/responses"
    line = {"method": "POST", "url": url}
    asked = line | {"custom_id": "a", "body": {"input": "Hi", "store": True}}
    by_default = line | {"custom_id": "b", "body": {"input": "Hi"}}
    async with served(b"Hello!") as server:
        done = await run(server, [asked, by_default], endpoint=url)
        first, second = await records(server, done["output_file_id"])
        found = [
            (await server.client.get(f"{url}/{record['response']['body']['id']}")).status_code
            for record in (first, second)
        ]
    assert found == [200, 404]


async def test_an_error_of_a_line_is_that_of_a_request() -> None:
    line = chat_line("a", temperature=9)
    async with served() as server:
        answer = await server.post(CHAT, line["body"])
        done = await run(server, [line, chat_line("b")])
        (found,) = await records(server, done["error_file_id"])
    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert found["response"]["status_code"] == answer.status_code == 400
    assert found["response"]["body"] == answer.json()


async def test_a_line_that_fails_in_the_engine_has_its_error() -> None:
    async with served(b"ab", runner=Breaking) as server:
        done = await run(server, chat_lines(3))
        found = await records(server, done["error_file_id"])
    assert {record["response"]["status_code"] for record in found} == {500}
    assert done["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
    assert done["output_file_id"] is None


BAD_LINES: Final[list[tuple[Any, str, str]]] = [
    ({"custom_id": 1}, "invalid_custom_id", "custom_id must be"),
    ({"custom_id": ""}, "invalid_custom_id", "custom_id must be"),
    ({"custom_id": "good"}, "duplicate_custom_id", "custom_id is that of line 1"),
    ({"method": "GET"}, "invalid_method", "method must be POST"),
    ({"url": "/v1/embeddings"}, "invalid_url", "url must be"),
    ({"url": 1}, "invalid_url", "url must be"),
    ({"body": []}, "invalid_body", "body must be an object"),
    ({"body": {"stream": True}}, "invalid_body", "body.stream: "),
    ({"body": {"background": True}}, "invalid_body", "body.background: "),
    ({"body": {"messages": [[]] * 200_001}}, "line_too_large", "more than 200000"),
]


@pytest.mark.parametrize(("fields", "code", "message"), BAD_LINES)
async def test_a_bad_line_is_in_the_error_file_by_its_number(
    fields: Any, code: str, message: str
) -> None:
    async with served() as server:
        done = await run(server, [chat_line("good"), b"", chat_line("bad") | fields])
        (found,) = await records(server, done["error_file_id"])
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert found["response"] is None
    assert (found["error"]["code"], found["error"]["line"]) == (code, 3)
    assert found["error"]["message"].startswith(f"line 3: {message}") or message in str(found)


async def test_a_line_that_is_too_long_is_bad_and_never_in_memory() -> None:
    long = chat_line("long", "x" * 200_000)
    last = json.dumps(chat_line("last", "x" * 50_000)).encode()
    async with served(max_body_bytes=1024) as server:
        done = await run(server, [long, chat_line("good"), last[:-1]])
        found = await records(server, done["error_file_id"])
    assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    assert [record["error"]["line"] for record in found] == [1, 3]
    assert found[0]["error"]["message"] == "line 1: the line is longer than 9216 bytes"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([chat_line("a"), b"{"], {"code": "invalid_json_line", "line": 2}),
        ([chat_line("a"), b"[]"], {"code": "invalid_json_line", "line": 2}),
        ([b"\xff\xff"], {"code": "invalid_json_line", "line": 1}),
        ([b"", b"  "], {"code": "empty_file", "line": None}),
        (chat_lines(4), {"code": "too_many_lines", "line": None}),
    ],
)
async def test_a_file_that_is_no_json_lines_is_refused_by_its_line(
    lines: list[Any], error: dict[str, Any]
) -> None:
    async with served(max_file_lines=3) as server:
        done = await run(server, lines)
    assert done["status"] == "failed"
    assert done["failed_at"] is not None
    (fault,) = done["errors"]["data"]
    assert {name: fault[name] for name in error} == error
    if error["line"] is not None:
        assert fault["message"].startswith(f"line {error['line']}: ")
    assert (done["output_file_id"], done["error_file_id"]) == (None, None)


async def test_an_input_that_has_gone_fails_the_batch(tmp_path: Path) -> None:
    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(1))
        (tmp_path / "batches" / "files" / file["id"]).unlink()
        batch = await create(server, file["id"])
        done = await ended(server, batch["id"])
    assert done["status"] == "failed"
    assert done["errors"]["data"][0]["param"] == "input_file_id"


@rows(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"input_file_id": 1}, "input_file_id"),
    ],
)
async def test_a_batch_that_there_is_not_is_refused(fields: Any, param: str) -> None:
    async with served() as server:
        file = await upload(server, chat_lines(1))
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        answer = await server.post(BATCHES, body | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_only_a_file_for_batches_is_read() -> None:
    async with served() as server:
        done = await run(server, chat_lines(1))
        body = {"input_file_id": done["output_file_id"], "endpoint": CHAT}
        answer = await server.post(BATCHES, body)
        assert answer.json()["error"]["param"] == "input_file_id"


async def test_a_window_has_minutes_hours_or_days() -> None:
    async with served() as server:
        file = await upload(server, chat_lines(1))
        for window, seconds in (("5m", 300), ("2h", 7200), ("7d", 604_800)):
            batch = await create(server, file["id"], completion_window=window)
            assert batch["expires_at"] == batch["created_at"] + seconds
            await ended(server, batch["id"])


async def test_output_files_expire_if_that_is_asked_for() -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    async with served() as server:
        done = await run(server, chat_lines(1), output_expires_after=expiry)
        file = (await server.client.get(f"{FILES}/{done['output_file_id']}")).json()
    assert file["expires_at"] == file["created_at"] + 3600


async def test_another_keys_batches_and_files_are_not_there() -> None:
    async with served(api_keys=SecretStr("one,two")) as server:
        two = {"Authorization": "Bearer two"}
        file = await upload(server, chat_lines(2), key="one")
        stolen = await server.client.post(
            BATCHES, json={"input_file_id": file["id"], "endpoint": CHAT}, headers=two
        )
        batch = await create(server, file["id"], key="one")
        done = await ended(server, batch["id"], key="one")
        assert done["status"] == "completed"
        for answer in (
            stolen,
            await server.client.get(f"{BATCHES}/{batch['id']}", headers=two),
            await server.client.post(f"{BATCHES}/{batch['id']}/cancel", headers=two),
            await server.client.get(f"{FILES}/{done['output_file_id']}/content", headers=two),
        ):
            assert answer.status_code == 404
        listed = await server.client.get(BATCHES, headers=two)
        assert listed.json()["data"] == []
        after = await server.client.get(f"{BATCHES}?after={batch['id']}", headers=two)
        assert after.status_code == 400
        assert len(await records(server, done["output_file_id"], key="one")) == 2


async def test_the_limits_of_a_key_are_not_those_of_its_batches() -> None:
    limits: dict[str, Any] = {"max_requests_per_key": 1, "requests_per_minute": 10}
    async with served(api_keys=SecretStr("one"), **limits) as server:
        file = await upload(server, chat_lines(20), key="one")
        batch = await create(server, file["id"], key="one")
        done = await ended(server, batch["id"], key="one")
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


async def test_batches_are_listed_in_pages() -> None:
    async with served() as server:
        file = await upload(server, chat_lines(1))
        ids = [(await create(server, file["id"]))["id"] for _ in range(3)]
        await server.service.batches.idle()
        page = (await server.client.get(f"{BATCHES}?limit=2")).json()
        rest = (await server.client.get(f"{BATCHES}?after={page['last_id']}")).json()
        none = (await server.client.get(f"{BATCHES}?after={ids[0]}")).json()
    assert [batch["id"] for batch in page["data"]] == [ids[2], ids[1]]
    assert (page["first_id"], page["has_more"]) == (ids[2], True)
    assert [batch["id"] for batch in rest["data"]] == [ids[0]]
    assert (none["data"], none["first_id"], none["last_id"]) == ([], None, None)


async def test_a_batch_is_cancelled_and_keeps_what_it_has(tmp_path: Path) -> None:
    async with served_in(tmp_path, is_gated=True) as server:
        file = await upload(server, [chat_line("a") | {"method": "GET"}, *chat_lines(20)])
        batch = await create(server, file["id"])
        await asyncio.to_thread(server.gate.reached.wait)
        running = (await server.client.get(f"{BATCHES}/{batch['id']}")).json()
        assert running["request_counts"] == {"total": 21, "completed": 0, "failed": 1}
        answer = await server.client.post(f"{BATCHES}/{batch['id']}/cancel")
        assert answer.json()["status"] == "cancelling"
        done = await ended(server, batch["id"])
        assert await server.num_unfinished() == 0
        assert server.service.admission.num_requests == 0
        again = await server.client.post(f"{BATCHES}/{batch['id']}/cancel")
        (found,) = await records(server, done["error_file_id"])
    assert done["status"] == "cancelled"
    assert done["cancelling_at"] is not None
    assert done["cancelled_at"] is not None
    assert found["error"]["line"] == 1
    assert again.status_code == 400


async def test_a_batch_that_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(5))
        wake = server.service.batches.wake
        server.service.batches.wake = lambda: None  # type: ignore[method-assign]
        batch = await create(server, file["id"])
        for _ in range(2):
            answer = await server.client.post(f"{BATCHES}/{batch['id']}/cancel")
            assert answer.json()["status"] == "cancelling"
        server.service.batches.wake = wake  # type: ignore[method-assign]
        wake()
        done = await ended(server, batch["id"])
    assert done["status"] == "cancelled"
    assert done["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


async def test_lines_that_are_not_served_in_time_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served_in(tmp_path, is_gated=True) as server:
        file = await upload(server, [*chat_lines(599), chat_line("bad") | {"method": "GET"}])
        batch = await create(server, file["id"], completion_window="1m")
        await asyncio.to_thread(server.gate.reached.wait)
        storage = server.service.storage.batch
        monkeypatch.setattr(storage, "clock", lambda: batch["expires_at"])
        server.service.tick(0.0, 0.0)
        done = await ended(server, batch["id"])
        found = await records(server, done["error_file_id"])
    assert done["status"] == "expired"
    assert done["expired_at"] == batch["expires_at"]
    assert done["request_counts"]["total"] == 600
    assert sum(done["request_counts"].values()) == 1200
    assert {record["error"]["code"] for record in found[:-1]} == {"batch_expired"}
    assert found[-1]["error"]["code"] == "invalid_method"
    assert len(found) == done["request_counts"]["failed"]


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The first server ends in the middle of it; its results stay."""
    async with served_in(tmp_path, is_gated=True) as server:
        file = await upload(server, chat_lines(20))
        batch = await create(server, file["id"])
        await asyncio.to_thread(server.gate.reached.wait)
    async with served_in(tmp_path) as server:
        server.service.batches.wake()
        done = await ended(server, batch["id"])
        found = await records(server, done["output_file_id"])
    assert done["status"] == "completed"
    assert [record["custom_id"] for record in found] == [f"id-{i}" for i in range(20)]


async def test_a_batch_waits_while_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(9))
        wake = server.service.batches.wake
        server.service.batches.wake = lambda: None  # type: ignore[method-assign]
        batch = await create(server, file["id"])
        server.service.batches.wake = wake  # type: ignore[method-assign]
        with full_disk(1000):
            wake()
            waiting = await ended(server, batch["id"])
        assert waiting["status"] == "validating"
        assert "waits, as its results cannot be stored" in caplog.text or (
            "batches cannot be looked up" in caplog.text
        )
        for _ in range(5):
            server.service.tick(0.0, 0.0)
        done = await ended(server, batch["id"])
    assert done["request_counts"] == {"total": 9, "completed": 9, "failed": 0}


async def test_lines_are_low_and_live_requests_are_not_rejected_for_them(tmp_path: Path) -> None:
    async with served_in(tmp_path, is_gated=True) as server:
        file = await upload(server, [chat_line(f"{i}", priority="high") for i in range(40)])
        batch = await create(server, file["id"])
        await asyncio.to_thread(server.gate.reached.wait)
        server.gate.open()
        lives = await asyncio.gather(*(server.chat() for _ in range(20)))
        assert {answer.status_code for answer in lives} == {200}
        assert server.service.admission.num_requests < 64
        page = (await server.client.get("/metrics")).text
        done = await ended_with_ticks(server, batch["id"])
    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    waits = 'mlx_server:queue_wait_seconds_count{model_name="fake/speaker",priority='
    assert f'{waits}"high"}} 0.0' in page
    assert f'{waits}"normal"}} 20.0' in page
    assert f'{waits}"low"}} 0.0' not in page


@pytest.mark.parametrize(
    ("url", "body", "pooling"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, None),
        ("/v1/completions", {"prompt": "Hi", "n": 2, "use_beam_search": True}, None),
        ("/v1/embeddings", {"input": ["Hi", "you"]}, PoolingType.LAST),
    ],
)
async def test_lines_are_best_effort_and_other_requests_are_not(
    url: str, body: Any, pooling: PoolingType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    add = BatchInferenceEngine.add

    def watched(engine: BatchInferenceEngine, *requests: BatchRequest) -> None:
        seen.extend(request.is_best_effort for request in requests)
        add(engine, *requests)

    monkeypatch.setattr(BatchInferenceEngine, "add", watched)
    embeddings = NO_EMBEDDINGS if pooling is None else Embeddings(pooling=pooling, size=4)
    async with served(b"Hello!", embeddings=embeddings) as server:
        assert (await server.post(url, {"priority": "low"} | body)).status_code == 200
        live = [seen.pop() for _ in list(seen)]
        await run(
            server, [{"custom_id": "a", "method": "POST", "url": url, "body": body}], endpoint=url
        )
    assert live and not any(live)
    assert seen and all(seen)


async def ended_with_ticks(server: Served, batch_id: str) -> Any:
    """Wait for the end of a batch, with the ticks of a server that runs."""
    waiting = asyncio.create_task(ended(server, batch_id))
    while not waiting.done():
        server.service.tick(0.0, 0.0)
        await asyncio.wait([waiting], timeout=0.01)
    return await waiting


@pytest.mark.parametrize(("is_begun", "num_total"), [(False, 0), (True, 5)])
async def test_a_batch_that_is_cancelled_before_or_while_it_is_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool, num_total: int
) -> None:
    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(5))
        runner = server.service.batches
        runner.wake = lambda: None  # type: ignore[method-assign]
        batch = await create(server, file["id"])
        batches = server.service.storage.batch.batches
        (claimed,) = batches.next_to_run((), 8, limit_over=8, now=0)

        def cancel() -> None:
            batches.change(batch["id"], lambda found: replace(found, status="cancelling"))

        def validate_meanwhile(*args: Any) -> Pieces[int]:
            cancel()
            return validate(*args)

        if is_begun:
            monkeypatch.setattr("app.batches.batch_run.validate", validate_meanwhile)
        else:
            cancel()
        await BatchRun(claimed, runner.services).run()
        done = await ended(server, batch["id"])
    assert done["status"] == "cancelled"
    assert done["request_counts"] == {"total": num_total, "completed": 0, "failed": 0}


async def test_a_file_that_is_deleted_meanwhile_has_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(1))
        storage = server.service.storage.batch
        add = storage.batches.add

        def late(batch: StoredBatch) -> bool:
            storage.files.delete("", file["id"])
            return add(batch)

        monkeypatch.setattr(storage.batches, "add", late)
        answer = await server.post(BATCHES, {"input_file_id": file["id"], "endpoint": CHAT})
    assert answer.status_code == 404


async def test_a_batch_that_waits_for_others_can_be_cancelled_and_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served_in(tmp_path, is_gated=True) as server:
        file = await upload(server, chat_lines(3))
        running = [await create(server, file["id"]) for _ in range(8)]
        await asyncio.to_thread(server.gate.reached.wait)
        cancelled = await create(server, file["id"])
        late = await create(server, file["id"], completion_window="1m")
        await server.client.post(f"{BATCHES}/{cancelled['id']}/cancel")
        assert await final_status(server, cancelled["id"]) == "cancelled"
        monkeypatch.setattr(server.service.storage.batch, "clock", lambda: late["expires_at"])
        server.service.tick(0.0, 0.0)
        assert await final_status(server, late["id"]) == "expired"
        server.gate.open()
        done = [await ended(server, batch["id"]) for batch in running]
    assert {batch["status"] for batch in done} == {"completed"}


def limited(max_owner_bytes: int) -> FileLimits:
    return FileLimits(1 << 20, max_owner_bytes)


async def test_results_that_there_is_no_room_for_end_a_batch(tmp_path: Path) -> None:
    async with served_in(tmp_path, limits=limited(50_000)) as server:
        done = await run(server, chat_lines(200))
        assert done["status"] == "failed"
        assert done["failed_at"] is not None
        (fault,) = done["errors"]["data"]
        assert fault["code"] == "no_room_for_results"
        assert "(MLX_SERVER_MAX_FILES_MIB)" in fault["message"]
        found = await records(server, done["output_file_id"])
        assert 0 < len(found) == done["request_counts"]["completed"] < 200
        files = (await server.client.get(FILES)).json()["data"]
        assert sum(file["bytes"] for file in files) <= 50_000
        await server.client.delete(f"{FILES}/{done['output_file_id']}")
        again = await run(server, chat_lines(1))
    assert again["status"] == "completed"


async def test_errors_that_there_is_no_room_for_end_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bad lines, and of those that were not served in time."""
    bad = [{"custom_id": f"id-{i}"} for i in range(500)]
    async with served_in(tmp_path, limits=limited(50_000), is_gated=True) as server:
        invalid = await run(server, bad)
        batch = await create(server, (await upload(server, chat_lines(200)))["id"])
        await asyncio.to_thread(server.gate.reached.wait)
        monkeypatch.setattr(server.service.storage.batch, "clock", lambda: batch["expires_at"])
        server.service.tick(0.0, 0.0)
        late = await ended(server, batch["id"])
    for done in (invalid, late):
        assert done["status"] == "failed"
        assert done["errors"]["data"][0]["code"] == "no_room_for_results"
    assert (invalid["output_file_id"], invalid["error_file_id"]) == (None, None)


async def test_no_line_is_served_without_room_for_a_result(tmp_path: Path) -> None:
    async with served_in(tmp_path, limits=limited(9000), is_gated=True) as server:
        file = await upload(server, chat_lines(9))
        wake = server.service.batches.wake
        server.service.batches.wake = lambda: None  # type: ignore[method-assign]
        batch = await create(server, file["id"])
        await upload(server, [b"x" * 4903])
        server.service.batches.wake = wake  # type: ignore[method-assign]
        wake()
        done = await ended(server, batch["id"])
    assert (done["status"], done["output_file_id"]) == ("failed", None)
    assert not server.gate.reached.is_set()


async def test_results_of_before_a_restart_count_before_their_batch_runs(tmp_path: Path) -> None:
    async with served_in(tmp_path, is_gated=True) as server:
        file = await upload(server, [*[{"custom_id": "bad"}] * 20, chat_line("good")])
        await create(server, file["id"])
        await asyncio.to_thread(server.gate.reached.wait)
        server.service.tick(0.0, 0.0)
    async with served_in(tmp_path, limits=limited(5000)) as server:
        fields = {"input_file_id": file["id"], "endpoint": CHAT}
        answer = await server.post(BATCHES, fields)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"].startswith("the files of this API key and the results")


async def test_a_key_has_so_many_unfinished_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.openai.batches.router._MAX_UNFINISHED", 2)
    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(1))
        server.service.batches.wake = lambda: None  # type: ignore[method-assign]
        for _ in range(2):
            await create(server, file["id"])
        refused = await server.post(BATCHES, {"input_file_id": file["id"], "endpoint": CHAT})
    assert refused.status_code == 429
    assert "has 2 unfinished batches" in refused.json()["error"]["message"]


async def final_status(server: Served, batch_id: str) -> str:
    """Wait for the end of a batch while others run."""
    async with asyncio.timeout(60):
        while True:
            batch = (await server.client.get(f"{BATCHES}/{batch_id}")).json()
            if batch["status"] in FINAL:
                return str(batch["status"])


async def test_a_batch_waits_after_an_error_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(3))
        with monkeypatch.context() as patch:
            patch.setattr("app.batches.batch_run.validate", None)
            batch = await create(server, file["id"])
            assert (await ended(server, batch["id"]))["status"] == "validating"
        assert "waits: TypeError at" in caplog.text
        for _ in range(5):
            server.service.tick(0.0, 0.0)
        assert (await ended(server, batch["id"]))["status"] == "completed"


async def test_a_database_that_fails_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("batches.sqlite: disk I/O error")

    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(3))
        with monkeypatch.context() as patch:
            patch.setattr(server.service.storage.batch.batches, "next_to_run", fail)
            batch = await create(server, file["id"])
            await server.service.batches.idle()
        assert "cannot be looked up: batches.sqlite: disk I/O error" in caplog.text
        server.service.batches.wake()
        assert (await ended(server, batch["id"]))["status"] == "completed"
