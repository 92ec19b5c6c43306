"""Looks after the engine and the event loop, once a second."""

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
    """Notices an engine that has failed, and ends what would wait for it in vain.

    on_failure: called once, when the engine has failed.
    on_tick: called every second with the clock and how late that was.
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
        self._unhealthy_reason: str | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            self._on_tick(loop.time(), loop.time() - due)
            self.look()

    def look(self) -> None:
        """Compare with the last look, and act on what is new."""
        before, self._unhealthy_reason = self._unhealthy_reason, self._service.unhealthy_reason
        if self._unhealthy_reason is None:
            if before is not None:
                logger.warning("the engine works again")
            return
        for engine in self._service.manager.engines:
            if engine.is_stalled:
                engine.fail_streams(EngineStalled())
        if before is None:
            logger.error("%s; /health answers 503", self._unhealthy_reason)
            self._on_failure()
