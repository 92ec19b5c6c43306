"""The execution of one batch, from its current status to its end."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from app.batches.lines import LineRules, NotJsonLines, read_lines
from app.batches.output import write_files
from app.batches.pacing import Pacer
from app.batches.processing import Dispatch, LineProcessor
from app.batches.records import Record, error_record
from app.batches.validation import validate
from app.batches.work import Counts, WorkFile
from app.http.client import Client
from app.observability.logs import logfmt
from app.storage.batch_storage import BatchStorage
from app.storage.batches import Change, StoredBatch
from app.storage.files import StoredFile
from app.storage.in_thread import in_thread

logger = logging.getLogger(__name__)

# Results that are put at once where lines have none.
_CHUNK: Final = 512
_EXPIRED: Final = "the completion window was over before this line was served"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServices:
    """What all batches of a server share.

    dispatch: sends a line to its endpoint.
    client_of: returns the client of an owner.
    count_line: called with `completed` or `failed` for each finished line.
    """

    storage: BatchStorage
    pacer: Pacer
    dispatch: Dispatch
    client_of: Callable[[str], Client]
    rules: LineRules
    count_line: Callable[[str], None]
    validating: asyncio.Lock = field(default_factory=asyncio.Lock)

    def now(self) -> int:
        return int(self.storage.clock())


class BatchRun:
    """Runs a batch that this server has claimed; lines that have a result are not served again.

    Each status is stored before the work that it stands for begins, so that a server that takes over the
    batch after a crash knows where to continue.
    """

    def __init__(self, batch: StoredBatch, services: BatchServices) -> None:
        self.batch = batch
        self.counts = Counts(batch.num_completed, batch.num_failed)
        self._services: Final = services
        self._path: Final = services.storage.files.path(batch.input_file_id)
        self._rules: Final = replace(services.rules, urls=(batch.endpoint,))
        self._processing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run the batch to its end.

        Raises:
            OSError: a file or the database cannot be read or written; the batch continues next time.
        """
        storage = self._services.storage
        work = await in_thread(lambda: WorkFile(storage.work_path(self.batch.id)))
        try:
            if self.batch.status == "validating":
                await self._validate(work)
            if self.batch.status == "in_progress":
                await self._process(work)
            if not self.batch.is_finished:
                await self._finish(work)
        finally:
            await in_thread(work.close)
        await in_thread(lambda: storage.remove_work(self.batch.id))

    async def check(self) -> None:
        """Store the counts, and stop if the batch was cancelled or its completion window is over.

        Raises:
            OSError: the database cannot be read or written.
        """
        if self.batch.status != "in_progress":
            return
        # Without a change this reads only.
        await self._change(lambda b: None if (new := self._counted(b)) == b else new)
        if self.batch.is_over(self._services.now()) and self._processing is not None:
            self._processing.cancel()

    async def _validate(self, work: WorkFile) -> None:
        batch_id = self.batch.id
        try:
            # One at a time: it is Python, which takes time from running requests.
            async with self._services.validating:
                await self._change(lambda _: None)
                if self.batch.status == "cancelling":
                    return
                num_total = await in_thread(
                    lambda: validate(self._path, batch_id, self._rules, work)
                )
        except NotJsonLines as error:
            fault = {"code": error.code, "line": error.number, "message": str(error), "param": None}
            await self._enter("failed", errors=[fault])
            return
        except FileNotFoundError:
            fault = {"code": "file_not_found", "line": None, "message": "there is no input file"}
            await self._enter("failed", errors=[fault | {"param": "input_file_id"}])
            return
        await self._enter("in_progress", num_total=num_total)
        for _ in range((await in_thread(work.counts)).num_failed):
            self._services.count_line("failed")

    async def _process(self, work: WorkFile) -> None:
        """Serve the lines until the end, or until `check` stops it."""
        self.counts = await in_thread(work.counts)
        processor = LineProcessor(
            self._path,
            self.batch.id,
            self._rules,
            work,
            client=self._services.client_of(self.batch.owner),
            pacer=self._services.pacer,
            dispatch=self._services.dispatch,
            on_record=self._count,
        )
        self._processing = asyncio.create_task(processor.run())
        try:
            await self.check()
            await asyncio.wait([self._processing])
        finally:
            self._processing.cancel()
            await asyncio.gather(self._processing, return_exceptions=True)
        if not self._processing.cancelled():
            self._processing.result()

    async def _finish(self, work: WorkFile) -> None:
        """Write the files of the batch, and store how it has ended with them."""
        storage, services = self._services.storage, self._services
        self.counts = await in_thread(work.counts)
        if self.batch.status != "cancelling" and self.batch.outcome is None:
            is_whole = sum(self.counts) == self.batch.num_total
            await self._enter("finalizing", outcome="completed" if is_whole else "expired")
        if self.batch.outcome == "expired":
            await in_thread(lambda: self._expire_rest(work))
            self.counts = await in_thread(work.counts)
        made = await in_thread(lambda: write_files(self.batch, work, storage.files, services.now()))
        ids = {
            "output_file_id": None if made.output is None else made.output.id,
            "error_file_id": None if made.errors is None else made.errors.id,
        }
        outcome = self.batch.outcome or "cancelled"
        enter = partial(_entered, status=outcome, now=services.now(), fields=ids)
        await self._change(lambda batch: self._counted(enter(batch)), made.all)
        self._log()

    def _expire_rest(self, work: WorkFile) -> None:
        """Record an error for each line that has no result."""
        records: list[Record] = []
        for line in read_lines(self._path, self._rules.max_line_bytes):
            if not work.has(line.number):
                records.append(error_record(self.batch.id, line.number, "batch_expired", _EXPIRED))
            if len(records) == _CHUNK:
                work.put(records)
                records.clear()
        work.put(records)

    def _count(self, record: Record) -> None:
        completed, failed = self.counts
        self.counts = Counts(completed + (not record.is_error), failed + record.is_error)
        self._services.count_line("failed" if record.is_error else "completed")

    def _counted(self, batch: StoredBatch) -> StoredBatch:
        completed, failed = self.counts
        return replace(batch, num_completed=completed, num_failed=failed)

    async def _enter(self, status: str, **fields: Any) -> None:
        """Store a status, unless the batch is cancelled meanwhile."""
        now = self._services.now()

        def change(batch: StoredBatch) -> StoredBatch:
            if batch.status == "cancelling":
                return replace(batch, num_total=fields.get("num_total", batch.num_total))
            return _entered(batch, status, now, fields)

        await self._change(change)
        self._log()

    async def _change(self, change: Change, files: Sequence[StoredFile] = ()) -> None:
        batches, batch_id = self._services.storage.batches, self.batch.id
        self.batch = await in_thread(lambda: batches.change(batch_id, change, files))

    def _log(self) -> None:
        batch = self.batch
        fields: dict[str, object] = {
            "batch": batch.id,
            "status": batch.status,
            "lines": batch.num_total,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        }
        logger.info("%s", logfmt(fields), extra={"fields": fields})


def _entered(batch: StoredBatch, status: str, now: int, fields: Mapping[str, Any]) -> StoredBatch:
    return replace(batch, status=status, times={**batch.times, status: now}, **fields)
