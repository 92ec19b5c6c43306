"""`POST /v1/systemone`."""

from functools import partial

from fastapi import APIRouter, Request, Response

from app.api.deciding import Decisions, begin_decisions
from app.api.openai.response_builder import new_id
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import respond_whole, written
from app.api.systemone.request import SystemOneRequest
from app.api.systemone.response import SystemOneResponse, system_one
from app.http.json_body import JsonRoute

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/v1/systemone", response_model=SystemOneResponse)
async def create_system_one(body: SystemOneRequest, request: Request) -> Response:
    """Return the probabilities of the answers to named questions about a state."""
    asked = Decisions(
        model=body.model,
        messages=body.messages(),
        questions=body.to_questions(),
        attachments={},
        priority=body.queue_priority,
        time_limit=body.timeout,
        cache_salt=body.cache_salt or "",
    )
    task = await begin_decisions(request, asked, completion_id=new_id("systemone"))

    async def respond() -> bytes:
        readings = await task.readings()
        write = partial(system_one, task.model_id, body.questions, readings, task.usage)
        return await written(request, lambda: write().model_dump_json())

    return await respond_whole(task, respond)
