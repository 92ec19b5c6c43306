"""The execution of one batch, from its current status to its end."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from app.batches.lines import LineRules, NotJsonLines, read_pieces
from app.batches.output import write_files
from app.batches.pacing import Pacer
from app.batches.processing import Dispatch, LineProcessor
from app.batches.records import Record, error_record
from app.batches.validation import validate
from app.batches.work import Counts, WorkFile
from app.http.client import Client
from app.observability.logs import logfmt
from app.storage.batch_storage import BatchStorage
from app.storage.batches import StoredBatch
from app.storage.disk.in_thread import Pieces, in_pieces, in_thread
from app.storage.disk.quota import NoRoomForFile
from app.storage.files import StoredFile
from app.turns import Turns

logger = logging.getLogger(__name__)

# One of the `errors` of a batch.
Fault = Mapping[str, str | int | None]

_EXPIRED: Final = "the completion window was over before this line was served"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServices:
    """The services that all batches of a server share.

    dispatch: sends a line to its endpoint.
    client_of: returns the client of an owner.
    count_line: called with `completed` or `failed` for each finished line.
    validating: the turn to validate a piece of an input. One at a time: it is Python, which takes time from
        running requests.
    """

    storage: BatchStorage
    pacer: Pacer
    dispatch: Dispatch
    client_of: Callable[[str], Client]
    rules: LineRules
    count_line: Callable[[str], None]
    validating: Turns = field(default_factory=lambda: Turns(lambda num_taken: not num_taken))

    def now(self) -> int:
        return int(self.storage.clock())


class BatchRun:
    """Runs a batch; lines that have a result are not served again.

    Each status is stored before the work that it stands for begins, so that after a crash the next start
    knows where to continue.
    """

    def __init__(self, batch: StoredBatch, services: BatchServices) -> None:
        self.batch = batch
        self.counts = Counts(batch.num_completed, batch.num_failed)
        self._services: Final = services
        self._path: Final = services.storage.files.path(batch.input_file_id)
        self._rules: Final = replace(services.rules, urls=(batch.endpoint,))
        self._charge: Final = services.storage.files.account(batch.owner).open(batch.num_bytes)
        self._processing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run the batch to its end.

        If its owner has no room for more results, it fails with those that there are, and no more of its lines
        are served.

        Raises:
            OSError: a file or the database cannot be read or written; the batch continues next time.
        """
        storage = self._services.storage
        work = await in_thread(lambda: WorkFile(storage.work_path(self.batch.id), self._charge))
        try:
            await in_thread(lambda: self._charge.set(work.num_bytes()))
            try:
                await self._obtain_results(work)
            except NoRoomForFile as error:
                await self._enter("finalizing", outcome="failed", errors=[_no_room(error)])
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
        await self._change(self._counted)
        if self.batch.is_over(self._services.now()) and self._processing is not None:
            self._processing.cancel()

    async def _obtain_results(self, work: WorkFile) -> None:
        """Put all the results that the batch will have.

        Raises:
            NoRoomForFile: there is no room for them.
        """
        if self.batch.status == "validating":
            await self._validate(work)
        if self.batch.status == "in_progress":
            await self._process(work)
        if self.batch.is_finished:
            return
        if self.batch.status != "cancelling" and self.batch.outcome is None:
            is_whole = sum(await in_thread(work.counts)) == self.batch.num_total
            await self._enter("finalizing", outcome="completed" if is_whole else "expired")
        if self.batch.outcome == "expired":
            await in_pieces(self._expire_rest(work))

    async def _validate(self, work: WorkFile) -> None:
        batch_id = self.batch.id
        await self._change(lambda batch: batch)
        if self.batch.status == "cancelling":
            return
        try:
            num_total = await in_pieces(
                validate(self._path, batch_id, self._rules, work),
                partial(self._services.validating.turn, self.batch.owner),
            )
        except NotJsonLines as error:
            fault = _fault(error.code, str(error), line=error.number)
        except NoRoomForFile as error:
            fault = _no_room(error)
        except FileNotFoundError:
            fault = _fault("file_not_found", "there is no input file", param="input_file_id")
        else:
            await self._enter("in_progress", num_total=num_total)
            for _ in range((await in_thread(work.counts)).num_failed):
                self._services.count_line("failed")
            return
        await self._enter("failed", errors=[fault])

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
        made = await in_pieces(write_files(self.batch, work, storage.files, services.now()))
        ids = {
            "output_file_id": None if made.output is None else made.output.id,
            "error_file_id": None if made.errors is None else made.errors.id,
        }
        outcome = self.batch.outcome or "cancelled"
        enter = partial(_entered, status=outcome, now=services.now(), fields=ids)
        await self._change(lambda batch: self._counted(enter(batch)), made.all)
        self._log()

    def _expire_rest(self, work: WorkFile) -> Pieces[None]:
        """Put an error for each line that has no result."""
        for piece in read_pieces(self._path, self._rules.max_line_bytes):
            work.put(
                [
                    error_record(self.batch.id, line.number, "batch_expired", _EXPIRED)
                    for line in piece.lines
                    if not work.has(line.number)
                ]
            )
            yield

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

    async def _change(
        self, change: Callable[[StoredBatch], StoredBatch], files: Sequence[StoredFile] = ()
    ) -> None:
        batches, batch_id = self._services.storage.batches, self.batch.id

        def store(num_bytes: int) -> StoredBatch:
            def counted(batch: StoredBatch) -> StoredBatch | None:
                changed = replace(change(batch), num_bytes=num_bytes)
                # Without a change this reads only.
                return None if changed == batch else changed

            return batches.change(batch_id, counted, files)

        self.batch = await in_thread(lambda: self._charge.store(store))

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


def _no_room(error: NoRoomForFile) -> Fault:
    return _fault("no_room_for_results", str(error))


def _fault(code: str, message: str, *, line: int | None = None, param: str | None = None) -> Fault:
    return {"code": code, "line": line, "message": message, "param": param}
