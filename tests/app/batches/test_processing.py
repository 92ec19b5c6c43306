"""Lines of a file through a dispatch that a test holds in its hand."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from app.admission.controller import AdmissionController, AdmissionLimits
from app.batches.lines import LineRules
from app.batches.pacing import Pacer
from app.batches.processing import Journal, LineProcessor
from app.batches.records import Record
from app.batches.validation import validate
from app.batches.work import WorkFile
from app.http.client import Client
from app.http.inner_call import InnerResponse
from app.storage.disk.in_thread import Pieces, in_pieces
from tests.support.batches import CHAT, chat_lines, full_disk, json_lines

pytestmark = pytest.mark.anyio

RULES = LineRules((CHAT,), 1000, 100)
CLIENT = Client("anonymous", is_batch=True)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[WorkFile]:
    with closing(WorkFile(tmp_path / "work.sqlite")) as opened:
        yield opened


class Dispatcher:
    """Responds with a status out of a list, and then with 200."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = list(statuses)
        self.ids: list[str] = []

    async def __call__(
        self, url: str, body: bytes, client: Client, request_id: str
    ) -> InnerResponse:
        self.ids.append(request_id)
        assert (url, client) == (CHAT, CLIENT)
        return InnerResponse(self._statuses.pop(0) if self._statuses else 200, b"{\n}")


class CountingWork(WorkFile):
    """Counts the results of each transaction, and keeps none."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def put(self, records: Sequence[Record]) -> None:
        self.groups.append(len(records))


def processor(path: Path, work: WorkFile, dispatch: Dispatcher) -> LineProcessor:
    return LineProcessor(
        path,
        "batch_1",
        RULES,
        work,
        client=CLIENT,
        pacer=Pacer(AdmissionController(AdmissionLimits(max_num_seqs=1))),
        dispatch=dispatch,
        on_record=lambda _: None,
    )


async def test_a_line_that_the_server_cannot_serve_now_is_sent_again(
    tmp_path: Path, work: WorkFile
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines(chat_lines(3)))
    assert await in_pieces(validate(path, "batch_1", RULES, work)) == 3
    dispatch = Dispatcher(503, 200, 500, 200)
    await processor(path, work, dispatch).run()
    assert sorted(dispatch.ids) == [
        "batch_req_1_1",
        "batch_req_1_1",
        "batch_req_1_2",
        "batch_req_1_3",
    ]
    assert work.counts() == (2, 1)
    assert all(b'"body": { }}, "error": null}' in record for record in work.records())


async def test_lines_that_have_a_result_are_not_sent(tmp_path: Path, work: WorkFile) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines(chat_lines(3)))
    work.put([Record(2, b"first", is_error=False), Record(2, b"again", is_error=True)])
    dispatch = Dispatcher()
    await processor(path, work, dispatch).run()
    assert sorted(dispatch.ids) == ["batch_req_1_1", "batch_req_1_3"]
    assert list(work.records())[1] == b"first"


async def test_lines_that_other_settings_have_made_bad_have_that_as_their_result(
    tmp_path: Path, work: WorkFile
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines(chat_lines(3)))
    await in_pieces(validate(path, "batch_1", replace(RULES, urls=("/v2",)), work))
    assert work.counts() == (0, 3)
    work.clear()
    made = LineProcessor(
        path,
        "batch_1",
        replace(RULES, urls=("/v2",)),
        work,
        client=CLIENT,
        pacer=Pacer(AdmissionController(AdmissionLimits())),
        dispatch=Dispatcher(),
        on_record=lambda _: None,
    )
    await made.run()
    assert work.counts() == (0, 3)


async def test_a_disk_that_is_full_in_the_middle_ends_it_and_what_is_there_is_whole(
    tmp_path: Path, work: WorkFile
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines(chat_lines(50)))
    big = Record(51, b"x" * 40_000, is_error=False)
    work.put([big])
    with full_disk(60_000), pytest.raises(OSError, match=r"/work\.sqlite: "):
        await processor(path, work, Dispatcher()).run()
    dispatch = Dispatcher()
    num_kept = sum(work.counts()) - 1
    await processor(path, work, dispatch).run()
    assert len(dispatch.ids) == 50 - num_kept
    assert work.counts() == (51, 0)


async def test_results_that_come_together_are_one_transaction() -> None:
    work = CountingWork()
    journal = Journal(work)
    await asyncio.gather(*(journal.put(Record(i, b"", is_error=False)) for i in range(9)))
    assert work.groups == [9]


async def test_results_that_come_before_a_batch_is_cancelled_are_written() -> None:
    work = CountingWork()
    journal = Journal(work)
    puts = [asyncio.create_task(journal.put(Record(i, b"", is_error=False))) for i in range(3)]
    await asyncio.sleep(0)
    for task in puts:
        task.cancel()
    ended = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert work.groups == [3]


def numbers(ended: list[str]) -> Pieces[int]:
    try:
        for _ in range(3):
            yield
    finally:
        ended.append("closed")
    return 3


async def test_each_piece_has_its_turn_and_the_last_one_the_result() -> None:
    turns = 0

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        nonlocal turns
        turns += 1
        yield

    ended: list[str] = []
    assert await in_pieces(numbers(ended), turn) == 3
    assert (turns, ended) == (4, ["closed"])


async def test_a_caller_that_is_cancelled_between_pieces_ends_them() -> None:
    lock = asyncio.Lock()
    await lock.acquire()
    ended: list[str] = []
    pieces = numbers(ended)
    next(pieces)
    task = asyncio.create_task(in_pieces(pieces, lambda: lock))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert ended == ["closed"]
