"""What the requests of one server share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import time
from typing import Final

import anyio
from fastapi import Request

from app.admission.controller import AdmissionController
from app.http.request_context import InFlightRequests
from app.observability.metrics.registry import Metrics
from app.observability.request_record import RequestRecord
from app.observability.throughput_log import ThroughputLogger
from app.settings import Settings
from batching import SchedulerManager

_MAX_COMPILED_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class ServerState:
    """`compiling` limits grammars: they take a core each, and nobody else waits for that."""

    manager: SchedulerManager
    settings: Settings
    admission: AdmissionController
    metrics: Metrics
    on_finish: Callable[[RequestRecord], None]
    in_flight: InFlightRequests = field(default_factory=InFlightRequests)
    activity: ThroughputLogger = field(default_factory=ThroughputLogger)
    started: int = field(default_factory=lambda: int(time()))
    compiling: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(_MAX_COMPILED_AT_ONCE)
    )

    def tick(self, now: float, lag: float) -> None:
        """Do what is done every second; `lag` is how many seconds the event loop is late."""
        self.metrics.observe_loop_lag(max(0.0, lag))
        self.activity.tell(now)

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the default model cannot be relied on; None while it can."""
        engine = self.manager.loaded(self.manager.model_ids[0])
        return "the model is not loaded" if engine is None else engine.unhealthy_reason

    @property
    def unreadiness(self) -> str | None:
        """Why a new request would better be sent elsewhere; None if it is welcome."""
        if self.admission.is_draining:
            return "the server is shutting down"
        if (reason := self.unhealthy_reason) is not None:
            return reason
        return "the queue is full" if self.admission.is_full else None


def server_state(request: Request) -> ServerState:
    service: ServerState = request.app.state.service
    return service
