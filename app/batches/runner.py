"""Runs the batches of the server."""

import asyncio
import logging
from typing import Final

from app.batches.batch_run import BatchRun, BatchServices
from app.batches.work import Counts
from app.observability.logs import summarize_exception
from app.storage.batches import StoredBatch
from app.storage.disk.in_thread import in_thread

logger = logging.getLogger(__name__)

# Batches whose lines take turns; later ones wait, so that they hold no memory.  A key has one in any case.
_MAX_RUNNING: Final = 8
# Batches beside them that are cancelled or whose time is over: they only have to end.
_MAX_ENDING: Final = 8
# Seconds after which expired files are deleted, and a batch that failed for want of disk goes on.
_SCAN_INTERVAL: Final = 5


class BatchRunner:
    """Runs the unfinished batches of the store; it lives on the event loop.

    It starts with the first call of `wake`.
    """

    def __init__(self, services: BatchServices) -> None:
        self.services: Final = services
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._scan: asyncio.Task[None] | None = None
        self._scans_again = False
        self._num_ticks = 0
        self._is_sweep_due = False
        self._failed: set[str] = set()
        self._is_closed = False

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def counts(self, batch_id: str) -> Counts | None:
        """Return the counts of a batch that runs, None for others; the store has them a second later."""
        found = self._runs.get(batch_id)
        return None if found is None else found[0].counts

    def wake(self) -> None:
        """Look for batches to start and to stop."""
        if self._is_closed:
            return
        if self._scan is not None:
            self._scans_again = True
            return
        self._scan = asyncio.create_task(self._look())
        # Not at the end of the task: one that is cancelled before it begins never gets there.
        self._scan.add_done_callback(self._looked)

    def tick(self) -> None:
        """Do what is due; called once a second."""
        self._num_ticks += 1
        self.services.pacer.wake()
        is_due = self._num_ticks % _SCAN_INTERVAL == 0
        if is_due:
            self._failed.clear()
            self._is_sweep_due = True
        if self._runs or is_due:
            self.wake()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Stop all batches; the next start continues them."""
        self._is_closed = True
        for task in self._tasks():
            task.cancel()
        await self.idle()

    def _tasks(self) -> list[asyncio.Task[None]]:
        scan = [] if self._scan is None else [self._scan]
        tasks = [*scan, *(task for _, task in self._runs.values())]
        return [task for task in tasks if not task.done()]

    async def _look(self) -> None:
        try:
            for run, _ in list(self._runs.values()):
                await run.check()
            if self._is_sweep_due:
                self._is_sweep_due = False
                await in_thread(self.services.storage.files.delete_expired)
            for batch in await in_thread(self._next):
                self._start(BatchRun(batch, self.services))
        except OSError as error:
            logger.error("batches cannot be looked up: %s", error)

    def _next(self) -> list[StoredBatch]:
        now = self.services.now()
        num_ending = sum(run.batch.is_over(now) for run, _ in list(self._runs.values()))
        num_live = len(self._runs) - num_ending
        return self.services.storage.batches.next_to_run(
            set(self._runs),
            _MAX_RUNNING - num_live,
            limit_over=_MAX_ENDING - num_ending,
            now=now,
            skipped=self._failed,
        )

    def _looked(self, _: object) -> None:
        self._scan = None
        if self._scans_again:
            self._scans_again = False
            self.wake()

    def _start(self, run: BatchRun) -> None:
        task = asyncio.create_task(self._run(run))
        self._runs[run.batch.id] = run, task
        task.add_done_callback(lambda _: self._ended(run.batch.id))

    def _ended(self, batch_id: str) -> None:
        del self._runs[batch_id]
        self.wake()

    async def _run(self, run: BatchRun) -> None:
        batch_id = run.batch.id
        try:
            await run.run()
        except OSError as error:
            logger.error("the batch %s waits, as its results cannot be stored: %s", batch_id, error)
            self._failed.add(batch_id)
        except Exception as error:
            logger.error("the batch %s waits: %s", batch_id, summarize_exception(error))
            self._failed.add(batch_id)
