"""`POST /v1/decisions`."""

from functools import partial

from fastapi import APIRouter, Request, Response

from app.api.deciding import Decisions, begin_decisions
from app.api.openai.decisions.request import DecisionRequest
from app.api.openai.decisions.response import Decision, decision
from app.api.openai.response_builder import new_id
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import respond_whole, written
from app.http.json_body import JsonRoute

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/v1/decisions", response_model=Decision)
async def create_decision(body: DecisionRequest, request: Request) -> Response:
    """Return the probabilities of the answers to questions about one input."""
    asked = Decisions(
        model=body.model,
        messages=body.messages(),
        questions=body.to_questions(),
        attachments=body.attachments(),
        priority=body.queue_priority,
        time_limit=body.timeout,
        cache_salt=body.cache_salt or "",
        retention=body.retention(),
    )
    task = await begin_decisions(request, asked, completion_id=new_id("decision"))

    async def respond() -> bytes:
        readings = await task.readings()
        write = partial(decision, task.model_id, body.questions, readings, task.usage)
        return await written(request, lambda: write().model_dump_json())

    return await respond_whole(task, respond)
