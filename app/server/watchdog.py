"""Checks the engines and the event loop every second."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from app.server_state import ServerState
from batching import EngineStalled

logger = logging.getLogger(__name__)

# Seconds.
_INTERVAL: Final = 1.0


class Watchdog:
    """Detects an unhealthy engine, and fails the streams that wait for a stalled one, or for a rank that is lost.

    on_failure: called once when an engine becomes unhealthy.
    on_tick: called every second with the time and the delay of the event loop.
    """

    def __init__(
        self,
        service: ServerState,
        *,
        on_failure: Callable[[], None],
        on_tick: Callable[[float, float], None] = lambda now, lag: None,
    ) -> None:
        self._service = service
        self._on_failure = on_failure
        self._on_tick = on_tick
        self._reason: str | None = None

    async def run(self) -> None:
        """Check until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            try:
                self.tick(loop.time(), max(0.0, loop.time() - due))
            except Exception:
                # The next tick checks again: a watchdog that has ended detects nothing.
                logger.exception("a tick of the watchdog failed")

    def tick(self, now: float, lag: float) -> None:
        """Check the engines once; `now` and `lag` as for `on_tick`."""
        # Time in which this process did not run, as when it was stopped or paused, is not the engine's.
        self._service.manager.health.excuse(lag)
        self.check()
        self._on_tick(now, lag)

    def check(self) -> None:
        """Log and act on a change of the engines' health since the last check."""
        before, self._reason = self._reason, self._service.unhealthy_reason
        if self._reason is None:
            if before is not None:
                logger.warning("the engine is healthy again")
            return
        lost = self._service.manager.health.lost_rank
        for engine in self._service.manager.engines.loaded:
            if lost is not None or engine.health.is_stalled:
                engine.fail_streams(lost or EngineStalled())
        if before is None:
            # That a rank is lost has been said when that was found.
            level = logging.ERROR if lost is None else logging.DEBUG
            logger.log(level, "%s; /health responds with 503", self._reason)
            self._on_failure()
