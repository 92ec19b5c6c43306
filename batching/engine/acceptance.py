"""Waits until an engine has accepted requests, which it does between two steps."""

import asyncio
from collections.abc import Awaitable

from batching.engine.health import EngineHealth
from batching.errors import DeadlineExceeded, EngineError, EngineStalled


class Acceptance:
    """The requests that an engine has not accepted yet; only the event loop uses it."""

    def __init__(self, health: EngineHealth) -> None:
        self._health = health
        # Each fails with the requests of one wait.
        self._failures: set[asyncio.Future[None]] = set()

    async def wait(self, job: Awaitable[None], time_limit: float | None) -> None:
        """Wait until a job has ended, which gives requests to the engine.

        Raises:
            DeadlineExceeded: the time limit was over before.
            EngineStalled: the step that it waits for has taken too long.
            EngineError: the engine cannot serve requests, or `fail` was called.
        """
        step_timeout = self._health.step_timeout
        has_deadline = time_limit is not None and time_limit < step_timeout
        timeout = time_limit if has_deadline else step_timeout
        added = asyncio.ensure_future(job)
        failed = asyncio.get_running_loop().create_future()
        self._failures.add(failed)
        first = asyncio.FIRST_COMPLETED
        try:
            while not (
                ended := (await asyncio.wait([added, failed], timeout=timeout, return_when=first))[
                    0
                ]
            ):
                if has_deadline:
                    raise DeadlineExceeded
                # Else it is this process that did not run meanwhile.
                await asyncio.sleep(0)
                if self._health.is_stalled:
                    raise EngineStalled
            for each in ended:
                each.result()
        finally:
            self._failures.discard(failed)
            failed.cancel()
            added.cancel()

    def fail(self, error: EngineError) -> None:
        """Fail all that waits."""
        for failed in self._failures:
            if not failed.done():
                failed.set_exception(error.with_traceback(None))
