"""`/v1/score` and `/v1/rerank`: the responses."""

from collections.abc import Sequence
from time import time
from typing import Literal

from pydantic import BaseModel

from app.api.openai.embeddings.response import EmbeddingUsage
from app.observability.request_record import TokenUsage


class ScoringUsage(EmbeddingUsage):
    """The usage of all prompts together, with vLLM's `completion_tokens`: nothing is generated."""

    completion_tokens: int = 0


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: ScoringUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    """`index` is the document's in the request; `document` is left out unless it is requested."""

    index: int
    document: RankedText | None = None
    relevance_score: float


class Ranking(BaseModel):
    """The most relevant documents first."""

    id: str
    model: str
    usage: ScoringUsage
    results: list[RankedDocument]


def score_list(
    completion_id: str, model_id: str, scores: Sequence[float], usage: TokenUsage
) -> ScoreList:
    return ScoreList(
        id=completion_id,
        created=int(time()),
        model=model_id,
        data=[Score(index=index, score=score) for index, score in enumerate(scores)],
        usage=ScoringUsage.of(usage),
    )


def ranked(scores: Sequence[float], documents: Sequence[str] | None) -> list[RankedDocument]:
    """Return all documents by their relevance; of equal ones, in the order of the request."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        RankedDocument(index=index, relevance_score=scores[index])
        if documents is None
        else RankedDocument(
            index=index, document=RankedText(text=documents[index]), relevance_score=scores[index]
        )
        for index in order
    ]
