"""`mlx-batch-server run-batch`: serves the lines of a file and writes the results, without a network."""

import asyncio
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from time import monotonic
from typing import Final

from fastapi import FastAPI
from tqdm import tqdm

from app.batches.lines import NotJsonLines
from app.batches.processing import LineProcessor
from app.batches.records import Record
from app.batches.validation import validate
from app.batches.work import WorkFile
from app.observability.logs import print_stderr
from app.server.stop_signals import stop_signals
from app.server.watchdog import Watchdog
from app.server_state import ServerState
from app.storage.disk.in_thread import in_pieces
from app.storage.files import Draft

_PART: Final = ".part"
_DRAFT: Final = ".draft"
_KILLED_BY: Final = 128  # a shell's status of a process that a signal ended, less its number

SOME_FAILED: Final = 1
# Seconds between lines that say how far it is, where there is no terminal.
_REPORT_INTERVAL: Final = 30.0


class BatchFailed(Exception):
    """The lines cannot be served; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class BatchPaths:
    """The input and output files; results are kept beside the output until it is complete."""

    source: Path
    target: Path

    @property
    def work(self) -> Path:
        return self.target.with_name(f"{self.target.name}{_PART}")

    @property
    def draft(self) -> Path:
        return self.target.with_name(f"{self.target.name}{_DRAFT}")


class Progress:
    """Reports the progress on standard error: a progress bar on a terminal, otherwise a line now and then."""

    def __init__(self, num_done: int, num_total: int, num_failed: int) -> None:
        self._num_done = num_done
        self._num_total: Final = num_total
        self._num_failed = num_failed
        self._reported = monotonic()
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Final = (
            tqdm(total=num_total, initial=num_done, unit="line") if is_terminal else None
        )

    def add(self, record: Record) -> None:
        self._num_done += 1
        self._num_failed += record.is_error
        if self._bar is not None:
            self._bar.set_postfix(failed=self._num_failed, refresh=False)
            self._bar.update()
        elif (now := monotonic()) > self._reported + _REPORT_INTERVAL:
            self._reported = now
            print_stderr(self._line())

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
        print_stderr(self._line())

    def _line(self) -> str:
        return f"{self._num_done} of {self._num_total} lines, {self._num_failed} of them failed"


def serve_lines(app: FastAPI, paths: BatchPaths, load: Callable[[], None]) -> int:
    """Serve the lines that have no result yet, and write the target once all have; return the status.

    load: loads the model, once the input is known to be one.

    Raises:
        BatchFailed: a file cannot be read or written, or is no JSON lines; or the model fails.
    """
    service: ServerState = app.state.service
    try:
        _check(paths)
        with _work(paths) as work:
            batch_id, num_total = _prepare(paths, work, service)
            load()
            completed, failed = work.counts()
            progress = Progress(completed + failed, num_total, failed)
            try:
                number = asyncio.run(_Serving(service, paths, batch_id, work, progress).run())
            finally:
                progress.end()
            if number:
                print_stderr("stopped; the same command goes on from here")
                return _KILLED_BY + number
            _write(paths, work)
            _remove(paths.work)
            return SOME_FAILED if work.counts().num_failed else 0
    except NotJsonLines as error:
        _remove(paths.work)
        raise BatchFailed(f"{paths.source}: {error}") from None
    except OSError as error:
        raise BatchFailed(str(error)) from None


def _check(paths: BatchPaths) -> None:
    """Raise an exception if the files cannot be what they are named as."""
    paths.source.stat()
    if paths.target.exists() and paths.source.samefile(paths.target):
        raise BatchFailed(f"{paths.target} is what is read")


@contextmanager
def _work(paths: BatchPaths) -> Iterator[WorkFile]:
    """Open the results, of which another process keeps off.

    The lock's file is closed last: that would end the locks of the database.
    """
    lock = os.open(paths.work, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with closing(WorkFile(paths.work)) as work:
            yield work
    except BlockingIOError:
        raise BatchFailed(f"{paths.work} is in use by another process") from None
    finally:
        os.close(lock)


def _prepare(paths: BatchPaths, work: WorkFile, service: ServerState) -> tuple[str, int]:
    """Return the id of the batch and its number of lines, which are checked unless they were before."""
    with paths.source.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    batch_id = f"batch_{digest[:32]}"
    known = work.fact("input")
    if known is None:
        rules = replace(service.batches.services.rules, max_lines=sys.maxsize)
        num_total = asyncio.run(in_pieces(validate(paths.source, batch_id, rules, work)))
        work.set_fact("lines", str(num_total))
        work.set_fact("input", digest)
    elif known != digest:
        raise BatchFailed(f"{paths.work} has results of another input; delete it to begin again")
    return batch_id, int(work.fact("lines") or 0)


class _Serving:
    """Serves lines until all have a result, a signal comes, or the model fails."""

    def __init__(
        self,
        service: ServerState,
        paths: BatchPaths,
        batch_id: str,
        work: WorkFile,
        progress: Progress,
    ) -> None:
        self._service: Final = service
        services = service.batches.services
        self._processor: Final = LineProcessor(
            paths.source,
            batch_id,
            services.rules,
            work,
            client=services.client_of(""),
            pacer=services.pacer,
            dispatch=services.dispatch,
            on_record=progress.add,
        )
        self._signal = 0

    async def run(self) -> int:
        """Return the number of the signal that ended it, or 0.

        Raises:
            BatchFailed: the model has failed.
        """
        task = asyncio.create_task(self._processor.run())
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._stop, task, number)
        watchdog = Watchdog(
            self._service, on_failure=lambda: self._stop(task, 0), on_tick=self._service.tick
        )
        watching = asyncio.create_task(watchdog.run())
        try:
            await task
        except asyncio.CancelledError:
            if not self._signal:
                raise BatchFailed(f"{self._service.unhealthy_reason}") from None
        finally:
            watching.cancel()
            await self._service.batches.close()
        return self._signal

    def _stop(self, task: "asyncio.Task[None]", number: int) -> None:
        self._signal = number
        task.cancel()


def _write(paths: BatchPaths, work: WorkFile) -> None:
    """Write all results in the order of the lines; the target is there when it is complete."""
    paths.draft.unlink(missing_ok=True)
    draft = Draft(paths.draft)
    try:
        for record in work.records():
            draft.write(record + b"\n")
        draft.rename(paths.target)
    finally:
        draft.close()


def _remove(path: Path) -> None:
    for suffix in ("-wal", "-shm", ""):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
