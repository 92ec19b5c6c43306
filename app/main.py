"""Where the parts of the HTTP side meet."""

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from app.admission.controller import AdmissionController
from app.api.openai import models
from app.api.openai.chat import router as chat
from app.api.openai.completions import router as completions
from app.api.ops import health, metrics as metrics_endpoint
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.vllm import tokenize
from app.http import errors
from app.http.authentication import Authentication
from app.http.body_limit import BodyLimit
from app.http.errors import REJECTION_REASONS
from app.http.request_context import RequestContextMiddleware
from app.observability.metrics.registry import Metrics
from app.observability.request_log import log_request
from app.observability.request_record import RequestRecord
from app.observability.tracing import Tracer
from app.server_state import ServerState
from app.settings import Settings
from batching import Observers, SchedulerManager


def create_app(
    manager: SchedulerManager, settings: Settings | None = None, tracer: Tracer | None = None
) -> FastAPI:
    """Return the app over the engines of a manager, which the caller closes, as the tracer.

    Without `settings` each has its default; the environment is not read.
    """

    def finish(record: RequestRecord) -> None:
        log_request(record)
        if tracer is not None:
            tracer.record(record)

    settings = settings or Settings.model_construct()
    app = FastAPI(title="mlx-batch-server", redirect_slashes=False)
    metrics = Metrics(manager.model_ids[0], rejection_reasons=REJECTION_REASONS)
    service = ServerState(
        manager, settings, AdmissionController(settings.limits()), metrics, finish
    )
    manager.observe(lambda _: Observers(metrics, service.activity))
    app.state.service = service
    errors.install(app)
    for endpoint in (chat, completions, tokenize, models, health, metrics_endpoint):
        app.include_router(endpoint.router, responses=ERROR_RESPONSES)
    _add_middleware(app, service)
    return app


def _add_middleware(app: FastAPI, service: ServerState) -> None:
    """Put what holds for every request around the app, the innermost first."""
    settings = service.settings
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout=settings.read_timeout)
    app.add_middleware(
        Authentication,
        keys=settings.client_keys(),
        share_prefix_cache=settings.share_prefix_cache,
    )
    app.add_middleware(RequestContextMiddleware, in_flight=service.in_flight)
    if settings.allowed_origins:
        # Around it all: a browser asks first, without a key, and reads errors only so.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
