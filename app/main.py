"""The FastAPI application: creates the parts of the server and connects them."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Final

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from app.admission.controller import AdmissionController
from app.api.anthropic import router as messages
from app.api.llama_cpp import infill
from app.api.models import management, router as models
from app.api.ollama import (
    embed as ollama_embed,
    models as ollama_models,
    router as ollama,
    store as ollama_store,
)
from app.api.openai.batches import router as batches
from app.api.openai.chat import router as chat
from app.api.openai.completions import router as completions
from app.api.openai.conversations import items_router as conversation_items, router as conversations
from app.api.openai.decisions import router as decisions
from app.api.openai.embeddings import router as embeddings
from app.api.openai.files import router as files
from app.api.openai.responses import router as responses, socket as response_socket
from app.api.openai.responses.stored import router as stored_responses
from app.api.ops import docs, events, health, metrics as metrics_endpoint
from app.api.scoring import router as scoring
from app.api.systemone import router as systemone
from app.api.vllm import adapters, server_info, tokenize
from app.batches.batch_run import BatchServices
from app.batches.lines import LineRules
from app.batches.pacing import Pacer
from app.batches.runner import BatchRunner
from app.http.authentication import Authentication, client_for_digest, client_for_key
from app.http.body_limit import BodyLimit
from app.http.browser_guard import BrowserGuard, checked_names
from app.http.client import ANONYMOUS, Client
from app.http.errors.responses import REJECTION_REASONS, register_handlers
from app.http.inner_call import post_json
from app.http.request_context import RequestContextMiddleware
from app.http.request_lifetime import RequestLifetime
from app.media.model_images import model_images
from app.observability.metrics.registry import Metrics
from app.observability.request_log import log_request
from app.observability.request_record import RequestRecord
from app.observability.tracing import Tracer
from app.server_state import ServerState
from app.settings import Settings, env_name
from app.settings.configs import admission_limits
from app.settings.keys import admin_keys, client_keys
from app.settings.storage import temporary_storage
from app.storage.storage import Storage
from app.warming.warmer import Warmer, WarmingServices
from app.web.pages import load_pages, page_router
from batching import Observers, SchedulerManager

# The endpoints to which the lines of a batch may be sent.
BATCH_ENDPOINTS: Final[Mapping[str, ModuleType]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
    "/v1/rerank": scoring,
    "/v1/score": scoring,
    "/v1/decisions": decisions,
    "/v1/systemone": systemone,
}
_ENDPOINTS: Final[Sequence[ModuleType]] = (
    chat,
    completions,
    responses,
    stored_responses,
    response_socket,
    conversations,
    conversation_items,
    files,
    batches,
    messages,
    ollama,
    ollama_embed,
    ollama_models,
    ollama_store,
    infill,
    embeddings,
    scoring,
    decisions,
    systemone,
    tokenize,
    adapters,
    models,
    management,
    health,
    metrics_endpoint,
    events,
    server_info,
    docs,
)
# Beside its body a line has an id and a few names.
_LINE_FRAME: Final = 8192


def create_app(
    manager: SchedulerManager,
    settings: Settings | None = None,
    tracer: Tracer | None = None,
    storage: Storage | None = None,
    kv_events: Mapping[str, Any] | None = None,
) -> FastAPI:
    """Return the app that serves the engines of a manager; the caller closes manager, tracer and storage.

    settings: None is the default of each setting; the environment is not read.
    tracer: receives the record of each finished request; None traces nothing.
    storage: None keeps everything in memory, whatever the settings say.
    kv_events: where the events of the prefix cache are published; None if they are not.
    """

    def finish(record: RequestRecord) -> None:
        log_request(record)
        if tracer is not None:
            tracer.record(record)

    settings = settings or Settings.model_construct()
    metrics = Metrics(manager.model_ids, rejection_reasons=REJECTION_REASONS)
    admission = AdmissionController(admission_limits(settings))
    storage = storage or temporary_storage(settings)
    # The endpoints for the lines of batches, which are requests that have been let in already.
    lines = FastAPI(openapi_url=None)
    batch_runner = _batch_runner(settings, admission, metrics, storage, lines)
    service = ServerState(
        manager,
        settings,
        admission,
        metrics,
        finish,
        batches=batch_runner,
        batch_endpoints=tuple(BATCH_ENDPOINTS),
        images=model_images(settings),
        storage=storage,
        warmer=_warmer(settings, manager, batch_runner.services),
        kv_events=kv_events,
    )
    manager.engines.observe(
        lambda model_id: Observers(metrics.engines[model_id], service.throughput_log)
    )
    _add_line_endpoints(lines, service)
    return _public_app(service)


def _public_app(service: ServerState) -> FastAPI:
    """Return the app that clients reach."""
    # FastAPI's pages load scripts from another site, and it makes the document on the event loop.
    app = FastAPI(
        title="mlx-batch-server",
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    register_handlers(app, service.metrics.count_rejection)
    pages = load_pages() if service.settings.web else {}
    # Before an API's own `HEAD /`.
    app.include_router(page_router(pages, service.settings.tool_origins))
    _add_endpoints(app, _ENDPOINTS)
    _add_middleware(app, service, open_paths=pages)
    return app


def _add_line_endpoints(lines: FastAPI, service: ServerState) -> None:
    lines.state.service = service
    register_handlers(lines)
    lines.add_middleware(RequestLifetime)
    lines.add_middleware(RequestContextMiddleware, in_flight=service.in_flight)
    _add_endpoints(lines, dict.fromkeys(BATCH_ENDPOINTS.values()))


def _add_endpoints(app: FastAPI, endpoints: Iterable[ModuleType]) -> None:
    """Add routes as they are: `include_router` would make them again, within the first request."""
    for endpoint in endpoints:
        app.router.routes.extend(endpoint.router.routes)


def _batch_runner(
    settings: Settings,
    admission: AdmissionController,
    metrics: Metrics,
    storage: Storage,
    lines: FastAPI,
) -> BatchRunner:
    """Return the runner of batches, which sends each line as a request to the app `lines`."""

    def client_of(owner: str) -> Client:
        share = settings.share_prefix_cache
        return replace(client_for_digest(owner, share_prefix_cache=share), is_batch=True)

    max_line_bytes = settings.max_body_bytes + _LINE_FRAME
    runner = BatchRunner(
        BatchServices(
            storage=storage.batch,
            pacer=Pacer(admission, settings.batch_lines_beside_requests),
            dispatch=partial(post_json, lines),
            client_of=client_of,
            rules=LineRules(BATCH_ENDPOINTS, max_line_bytes, settings.max_file_lines),
            count_line=metrics.count_batch_line,
        )
    )
    metrics.num_batches.set_function(lambda: runner.num_running)
    return runner


def _warmer(
    settings: Settings, manager: SchedulerManager, services: BatchServices
) -> Warmer | None:
    """Return what sends the lines of the file of prompts, as those of batches are; None without a file."""
    if settings.warm_file is None:
        return None

    def has_room(model: str | None) -> bool:
        engine = manager.loaded(manager.model_ids[0] if model is None else model)
        if engine is None:
            return True
        stats = engine.latest_stats
        return stats.num_pinned_blocks < stats.max_pinned_blocks

    return Warmer(
        settings.warm_file,
        f"{env_name('warm_file')}: {settings.warm_file}",
        WarmingServices(
            clients=[*_cache_owners(settings)],
            pacer=services.pacer,
            dispatch=services.dispatch,
            has_room=has_room,
            max_line_bytes=services.rules.max_line_bytes,
        ),
    )


def _cache_owners(settings: Settings) -> Iterator[Client]:
    """Yield a client for each prefix cache: one of each key, or one that all share."""
    keys = dict.fromkeys(client_keys(settings))
    if settings.share_prefix_cache or not keys:
        yield replace(ANONYMOUS, is_batch=True, pins=True)
        return
    for key in keys:
        client = client_for_key(key, share_prefix_cache=False)
        yield replace(client, is_batch=True, pins=True)


def _add_middleware(app: FastAPI, service: ServerState, *, open_paths: Container[str]) -> None:
    """Add the middleware, the innermost first; `open_paths` need no key."""
    settings, count_rejection = service.settings, service.metrics.count_rejection
    keys = frozenset(client_keys(settings))
    app.add_middleware(
        RequestLifetime, streamed=(files.PATH,), late_head=settings.late_head_ms / 1000
    )
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        timeout=settings.read_timeout,
        streamed=(files.PATH,),
        # Without keys all are one.
        num_clients=max(1, len(keys)),
        count_rejection=count_rejection,
    )
    app.add_middleware(
        Authentication,
        keys=keys,
        share_prefix_cache=settings.share_prefix_cache,
        count_rejection=count_rejection,
        admin_keys=frozenset(admin_keys(settings)),
        open_paths=open_paths,
    )
    app.add_middleware(
        BrowserGuard,
        hosts=checked_names(settings.host, settings.allowed_host_names, has_keys=bool(keys)),
        origins=None if keys else settings.allowed_origins,
        count_rejection=count_rejection,
    )
    app.add_middleware(
        RequestContextMiddleware, in_flight=service.in_flight, count_rejection=count_rejection
    )
    if settings.allowed_origins:
        # Outermost: browsers send preflight requests without a key, and need CORS headers on errors.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            # For a named page of the internet that asks a server on its reader's own network.
            allow_private_network="*" not in settings.allowed_origins,
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
