"""The state that all requests of a server share."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Final

from fastapi import Request

from app.admission.controller import AdmissionController
from app.batches.runner import BatchRunner
from app.http.request_context import InFlightRequests
from app.http.streams.event_log import EventLog
from app.http.streams.unsent_bytes import UnsentBytes
from app.media.model_images import ModelImages
from app.observability.machine_room import MachineRoom
from app.observability.metrics.registry import Metrics
from app.observability.request_record import RequestRecord
from app.observability.throughput_log import ThroughputLogger
from app.settings import Settings
from app.storage.seal import Sealer
from app.storage.storage import Storage
from app.warming.warmer import Warmer
from app.worker_threads import WorkerThreads
from batching import SchedulerManager

# Threads for each kind of work.  They take cores from the model, and rendering and compiling have two processes.
_NUM_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class RequestThreads:
    """Threads for the blocking work of requests; one kind of work does not wait for another.

    prompts: render and tokenize.
    templates: render chat templates that requests bring.
    grammars: compile grammars.
    adapters: read adapters, each for minutes if it is large and its disk is slow.
    """

    prompts: WorkerThreads = field(default_factory=lambda: WorkerThreads(_NUM_THREADS))
    templates: WorkerThreads = field(default_factory=lambda: WorkerThreads(_NUM_THREADS))
    grammars: WorkerThreads = field(default_factory=lambda: WorkerThreads(_NUM_THREADS))
    adapters: WorkerThreads = field(default_factory=lambda: WorkerThreads(_NUM_THREADS))


@dataclass(frozen=True, slots=True)
class DetachedResponse:
    """A response in the background.

    task: generates it.
    events: for clients that follow it; None if it was not asked for with `stream`.
    """

    task: asyncio.Task[None]
    events: EventLog | None = None


@dataclass(frozen=True, slots=True)
class ServerState:
    """The parts of a server; routers get it with `server_state(request)`.

    manager: the engines.
    on_finish: called with the record of each request that reached an engine.
    batches: runs the batches.
    batch_endpoints: the paths that lines of a batch may be sent to.
    warmer: puts prompts into the prefix cache after the start; None if there is nothing to do.
    in_flight: the requests for which a shutdown waits.
    unsent: the large bodies that clients have not read yet.
    images: reads the images of requests.
    storage: stored responses, files and batches; in memory by default.
    detached: the responses in the background that are being generated, by their ids.
    model_watchers: those that follow the states of the models.
    started: when the server was started, in seconds since the epoch.
    threads: for the blocking work of requests.
    kv_events: where the events of the prefix cache are published; None if they are not.
    """

    manager: SchedulerManager
    settings: Settings
    admission: AdmissionController
    metrics: Metrics
    on_finish: Callable[[RequestRecord], None]
    batches: BatchRunner
    batch_endpoints: Sequence[str]
    images: ModelImages
    warmer: Warmer | None = None
    in_flight: InFlightRequests = field(default_factory=InFlightRequests)
    unsent: UnsentBytes = field(default_factory=UnsentBytes)
    throughput_log: ThroughputLogger = field(default_factory=ThroughputLogger)
    storage: Storage = field(default_factory=Storage)
    detached: dict[str, DetachedResponse] = field(default_factory=dict)
    machine_room: MachineRoom = field(default_factory=MachineRoom)
    model_watchers: set[object] = field(default_factory=set)
    started: int = field(default_factory=lambda: int(time()))
    threads: RequestThreads = field(default_factory=RequestThreads)
    kv_events: Mapping[str, Any] | None = None

    @property
    def sealer(self) -> Sealer:
        return self.storage.sealer

    def tick(self, now: float, lag: float) -> None:
        """Run the periodic tasks; the watchdog calls it once a second.

        now: seconds on the event loop's clock.
        lag: the delay of the event loop in seconds.
        """
        self.metrics.observe_loop_lag(lag)
        self.throughput_log.log_if_due(now)
        self.batches.tick()
        self.manager.tick()

    @property
    def unhealthy_reason(self) -> str | None:
        """Why a model cannot serve requests, or none can be loaded; None while the server is healthy.

        A model that is not loaded is no fault, nor one that cannot be loaded: others are served.
        """
        reasons = {
            engine.model.model_id: reason
            for engine in self.manager.engines.loaded
            if (reason := engine.health.unhealthy_reason) is not None
        }
        if not reasons or self.manager.health.lost_rank is not None:
            return self.manager.health.unhealthy_reason
        if len(self.manager.model_ids) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{model_id}: {reason}" for model_id, reason in reasons.items())

    @property
    def not_ready_reason(self) -> str | None:
        """Why a load balancer should send new requests elsewhere; None if this server accepts them."""
        if (reason := self.unhealthy_reason) is not None:
            return reason
        if self.admission.is_draining:
            return "the server is shutting down"
        return "the queue is full" if self.admission.is_full else None


def server_state(request: Request) -> ServerState:
    service: ServerState = request.app.state.service
    return service
