"""`/v1/decisions`: the response."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from app.api.deciding import Reading
from app.api.openai.decisions.request import AnyQuestion, ChoiceQuestion, PredicateQuestion
from app.api.openai.responses.items.output_items import ResponseUsage
from app.observability.request_record import TokenUsage


class PredicateAnswer(BaseModel):
    type: Literal["predicate"] = "predicate"
    name: str | None
    probability: float


class ChoiceProbability(BaseModel):
    value: str | bool
    probability: float


class ChoiceAnswer(BaseModel):
    type: Literal["choice"] = "choice"
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(BaseModel):
    """`value` is the index of the level."""

    value: int
    label: str
    probability: float


class ScoreAnswer(BaseModel):
    """`score` is the mean of the values, by their probabilities."""

    type: Literal["score"] = "score"
    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class Decision(BaseModel):
    """The answers are in the order of the questions."""

    model: str
    answers: list[Answer]
    usage: ResponseUsage


def decision(
    model_id: str,
    questions: Sequence[AnyQuestion],
    readings: Sequence[Reading],
    usage: TokenUsage,
) -> Decision:
    answers = [_answer(q, reading) for q, reading in zip(questions, readings, strict=True)]
    return Decision(model=model_id, answers=answers, usage=ResponseUsage.of(usage))


def _answer(question: AnyQuestion, reading: Reading) -> Answer:
    probabilities = reading.probabilities
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name=question.name, probability=probabilities[0])
    if isinstance(question, ChoiceQuestion):
        return ChoiceAnswer(
            name=question.name,
            choice=question.choices[reading.best].value,
            confidence=reading.confidence,
            probabilities=[
                ChoiceProbability(value=each.value, probability=p)
                for each, p in zip(question.choices, probabilities, strict=True)
            ],
        )
    return ScoreAnswer(
        name=question.name,
        score=reading.expected,
        confidence=reading.confidence,
        probabilities=[
            ScoreProbability(value=i, label=each.label, probability=p)
            for i, (each, p) in enumerate(zip(question.levels, probabilities, strict=True))
        ],
    )
