"""`POST /v1/score` and `/v1/rerank`, also where vLLM, Jina and Cohere have them."""

from functools import partial

from fastapi import APIRouter, Request, Response

from app.api.openai.response_builder import new_id
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.scoring.request import RerankRequest, ScoreRequest
from app.api.scoring.response import Ranking, ScoreList, ScoringUsage, ranked, score_list
from app.api.scoring.scorer import Comparison, begin_scoring
from app.api.serving import respond_whole, written
from app.http.json_body import JsonRoute

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/v1/score", response_model=ScoreList)
@router.post("/score", response_model=ScoreList)
async def create_scores(body: ScoreRequest, request: Request) -> Response:
    """Return how relevant texts are to others, or how similar."""
    completion_id = new_id("score")
    comparison = Comparison(pairs=body.pairs(), params=("text_1", "text_2"))
    task = await begin_scoring(request, body, comparison, completion_id=completion_id)

    async def respond() -> str:
        scores = await task.scores()
        return score_list(completion_id, task.model_id, scores, task.usage).model_dump_json()

    return await respond_whole(task, respond)


@router.post("/v1/rerank", response_model=Ranking)
@router.post("/v2/rerank", response_model=Ranking)
@router.post("/rerank", response_model=Ranking)
async def create_ranking(body: RerankRequest, request: Request) -> Response:
    """Return documents by their relevance to a query."""
    completion_id, texts = new_id("rerank"), body.texts()
    comparison = Comparison(
        pairs=[(body.query, text) for text in texts],
        params=("query", "documents"),
        roles=("query", "document"),
    )
    task = await begin_scoring(request, body, comparison, completion_id=completion_id)

    async def respond() -> bytes:
        shown = texts if body.return_documents else None
        results = ranked(await task.scores(), shown)
        ranking = Ranking(
            id=completion_id,
            model=task.model_id,
            usage=ScoringUsage.of(task.usage),
            results=results[: body.top_n or None],
        )
        write = partial(ranking.model_dump_json, exclude_none=True)
        return await written(request, write, sum(map(len, shown or ())))

    return await respond_whole(task, respond)
