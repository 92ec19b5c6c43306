"""`GET /metrics`: the page that Prometheus collects."""

from fastapi import APIRouter, Request, Response

from app.api.schemas.errors import ERROR_RESPONSES, TEXT_RESPONSES
from app.observability.metrics.engine_gauges import EngineState
from app.server_state import server_state
from batching import AsyncEngine

router = APIRouter(responses=ERROR_RESPONSES)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses=TEXT_RESPONSES)
async def read_metrics(request: Request) -> Response:
    """Return the counts as they stand, as text or as OpenMetrics."""
    service = server_state(request)
    for status in service.manager.statuses():
        state = service.metrics.engines[status.model_id].state
        state.status = status
        if (engine := service.manager.loaded(status.model_id)) is None:
            state.forget_engine()
        else:
            _read(engine, state, service.settings.enable_prefix_cache)
    body, content_type = service.metrics.render(request.headers.get("Accept"))
    return Response(body, headers={"Content-Type": content_type})


def _read(engine: AsyncEngine, state: EngineState, enable_prefix_cache: bool) -> None:
    state.stats = engine.latest_stats
    state.adapters = engine.adapters_in_use
    state.is_healthy = engine.health.unhealthy_reason is None
    state.seconds_since_step = engine.health.seconds_since_step
    state.set_cache_config(
        block_size=state.stats.block_size,
        num_blocks=state.stats.num_blocks,
        enable_prefix_cache=enable_prefix_cache,
    )
