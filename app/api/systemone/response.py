"""`/v1/systemone`: the response."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from app.api.deciding import Reading
from app.api.systemone.request import AnyQuestion, ChoiceQuestion, NoulQuestion
from app.observability.request_record import TokenUsage


class NoulAnswer(BaseModel):
    type: Literal["noul"] = "noul"
    noul: float


class ChoiceAnswer(BaseModel):
    type: Literal["choice"] = "choice"
    choice: str
    probabilities: dict[str, float]
    confidence: float


class ScoreAnswer(BaseModel):
    """`score` is the mean of the indices of the levels; `legend` has the levels by theirs."""

    type: Literal["score"] = "score"
    score: float
    legend: dict[str, str]
    probabilities: dict[str, float]
    confidence: float


Answer = NoulAnswer | ChoiceAnswer | ScoreAnswer


class SystemOneUsage(BaseModel):
    input_tokens: int
    output_tokens: int


class SystemOneResponse(BaseModel):
    model: str
    answers: dict[str, Answer]
    usage: SystemOneUsage


def system_one(
    model_id: str,
    questions: Mapping[str, AnyQuestion],
    readings: Sequence[Reading],
    usage: TokenUsage,
) -> SystemOneResponse:
    pairs = zip(questions.items(), readings, strict=True)
    return SystemOneResponse(
        model=model_id,
        answers={name: _answer(question, reading) for (name, question), reading in pairs},
        usage=SystemOneUsage(
            input_tokens=usage.num_prompt_tokens, output_tokens=usage.num_output_tokens
        ),
    )


def _answer(question: AnyQuestion, reading: Reading) -> Answer:
    probabilities = reading.probabilities
    if isinstance(question, NoulQuestion):
        return NoulAnswer(noul=probabilities[0])
    if isinstance(question, ChoiceQuestion):
        names = list(question.criteria)
        return ChoiceAnswer(
            choice=names[reading.best],
            probabilities=dict(zip(names, probabilities, strict=True)),
            confidence=reading.confidence,
        )
    return ScoreAnswer(
        score=reading.expected,
        legend={str(i): level for i, level in enumerate(question.criteria)},
        probabilities={str(i): p for i, p in enumerate(probabilities)},
        confidence=reading.confidence,
    )
