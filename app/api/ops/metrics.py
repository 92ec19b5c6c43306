"""`GET /metrics`: what Prometheus collects."""

from fastapi import APIRouter, Request, Response

from app.api.schemas.errors import TEXT_RESPONSES
from app.api.serving import engine_for
from app.server_state import server_state

router = APIRouter()


@router.get("/metrics", response_class=Response, responses=TEXT_RESPONSES)
async def read_metrics(request: Request) -> Response:
    """Return the counts as they stand, as text or as OpenMetrics."""
    service, engine = server_state(request), await engine_for(request, None)
    stats = engine.latest_stats
    service.metrics.observe_stats(stats)
    service.metrics.set_health(engine.unhealthy_reason is None, engine.seconds_since_step)
    service.metrics.set_cache_config(
        block_size=stats.block_size,
        num_blocks=stats.num_blocks,
        enable_prefix_cache=service.settings.enable_prefix_cache,
    )
    body, content_type = service.metrics.render(request.headers.get("Accept"))
    return Response(body, headers={"Content-Type": content_type})
