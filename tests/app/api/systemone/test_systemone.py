"""`POST /v1/systemone`: the same decisions in TypeSafe's form."""

from typing import Any

import httpx
import pytest

from tests.support.judge import Judge
from tests.support.rows import rows
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

QUESTIONS: dict[str, dict[str, Any]] = {
    "late": {
        "type": "noul",
        "instructions": "yes, it is late",
        "criteria": {"true": "after noon"},
    },
    "team": {
        "type": "choice",
        "instructions": {"question": "Which team?"},
        "criteria": {"billing": None, "support": "right", "sales": ["a", "b"]},
    },
    "mood": {
        "type": "score",
        "instructions": "How angry?",
        "criteria": ["calm", {"angry": 1}, "as I said: right"],
    },
}


async def ask(server: Served, **fields: Any) -> httpx.Response:
    body = {"model": MODEL_ID, "state": {"a": [1]}, "questions": QUESTIONS, **fields}
    return await server.post("/v1/systemone", body)


async def test_answers_have_the_names_of_their_questions() -> None:
    Judge.prompts.clear()
    async with served(runner=Judge) as server:
        response = await ask(server)
        assert await server.num_unfinished() == 0
    assert response.status_code == 200, response.text
    most, sixth = pytest.approx(2 / 3), pytest.approx(1 / 6)
    answer = response.json()
    assert answer.pop("usage")["output_tokens"] == 3
    assert answer == {
        "model": MODEL_ID,
        "answers": {
            "late": {"type": "noul", "noul": most},
            "team": {
                "type": "choice",
                "choice": "support",
                "probabilities": {"billing": sixth, "support": most, "sales": sixth},
                "confidence": pytest.approx(0.5),
            },
            "mood": {
                "type": "score",
                "score": pytest.approx(1.5),
                "legend": {"0": "calm", "1": '{"angry": 1}', "2": "as I said: right"},
                "probabilities": {"0": sixth, "1": sixth, "2": most},
                "confidence": pytest.approx(0.5),
            },
        },
    }
    late = next(text for text in Judge.prompts if "it is late" in text)
    team = next(text for text in Judge.prompts if "Which" in text)
    assert 'user: {"a": [1]}\n\nQuestion: ' in late
    assert "Question: yes, it is late\nYes. after noon\nReply with Yes or No only." in late
    asked = '{"question": "Which team?"}\nA. billing\nB. support: right\nC. sales: ["a", "b"]\n'
    assert asked in team


@rows(
    ("fields", "param"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": {str(i): QUESTIONS["late"] for i in range(401)}}, "questions"),
        ({"questions": [QUESTIONS["late"]]}, "questions"),
        ({"questions": {"a": {"type": "box"}}}, "questions.a.type"),
        ({"questions": {"a": {**QUESTIONS["team"], "criteria": {}}}}, "questions.a.criteria"),
        ({"questions": {"a": {**QUESTIONS["mood"], "criteria": ["a"] * 11}}}, "questions.a.criteria"),
        ({"state": 1}, "state"),
        ({"images": ["AAAA"]}, "images"),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_is_rejected_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    async with served(runner=Judge) as server:
        response = await ask(server, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
