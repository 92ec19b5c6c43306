"""`POST /v1/decisions`: the probabilities of answers, and one prompt for all questions."""

from typing import Any

import httpx
import httpx2
import openai
import pytest
from openai.types import Decision

from app.prompts.conversation import ChatMessage
from app.prompts.scoring.questions import INSTRUCTIONS, Option, Question, question_prompts
from batching import ModelInfo
from tests.support.batches import records, run
from tests.support.harmony_model import harmony_tokenizer
from tests.support.judge import Judge
from tests.support.rows import rows
from tests.support.sdk_types import check_shape
from tests.support.speaker import MODEL_ID, ByteTokenizer, Served, served

pytestmark = pytest.mark.anyio

PATH = "/v1/decisions"
PREDICATE = {"type": "predicate", "name": "late", "instructions": "yes, it is late"}
CHOICE = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [
        {"value": "billing", "description": "Money"},
        {"value": True, "description": "right"},
        {"value": "true"},
    ],
}
SCORE = {
    "type": "score",
    "name": "mood",
    "instructions": "How angry?",
    "levels": [{"label": "calm"}, {"label": "angry"}, {"label": "furious", "description": "right"}],
}
QUESTIONS = [PREDICATE, CHOICE, SCORE]
CONTEXT = [f"Line {i} of a long letter." for i in range(30)]


@pytest.fixture(autouse=True)
def _no_prompts() -> None:
    Judge.prompts = []


async def decide(server: Served, questions: Any = QUESTIONS, **fields: Any) -> httpx.Response:
    body = {"model": MODEL_ID, "input": "It is late.", "questions": questions, **fields}
    return await server.post(PATH, body)


async def error(server: Served, *questions: Any, **fields: Any) -> tuple[str, str]:
    response = await decide(server, *questions, **fields)
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    return found["param"], found["message"]


async def test_openais_sdk_reads_each_kind_of_answer() -> None:
    async with served(runner=Judge) as server:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
        client = openai.AsyncOpenAI(
            api_key="-", base_url="http://localhost/v1", http_client=http, max_retries=0
        )
        asked: Any = QUESTIONS
        decision = await client.decisions.create(
            model=MODEL_ID, input="It is late.", questions=asked, safety_identifier="me"
        )
        raw = (await decide(server)).json()
        assert await server.num_unfinished() == 0
    assert check_shape(raw, Decision).answers == decision.answers
    late, team, mood = raw["answers"]
    assert late == {"type": "predicate", "name": "late", "probability": pytest.approx(2 / 3)}
    assert team == {
        "type": "choice",
        "name": None,
        "choice": True,
        "confidence": pytest.approx(0.5),
        "probabilities": [
            {"value": "billing", "probability": pytest.approx(1 / 6)},
            {"value": True, "probability": pytest.approx(2 / 3)},
            {"value": "true", "probability": pytest.approx(1 / 6)},
        ],
    }
    assert mood["score"] == pytest.approx(1 / 6 + 2 * 2 / 3)
    assert mood["confidence"] == pytest.approx(0.5)
    assert [(p["value"], p["label"]) for p in mood["probabilities"]] == [
        (0, "calm"),
        (1, "angry"),
        (2, "furious"),
    ]
    assert sum(p["probability"] for p in mood["probabilities"]) == pytest.approx(1)


async def test_a_prompt_is_the_input_and_one_question() -> None:
    async with served(runner=Judge) as server:
        await decide(server)
    start = f"system: {INSTRUCTIONS}\nuser: It is late.\n\nQuestion: "
    options = "A. billing: Money\nB. true: right\nC. true"
    levels = "0. calm\n1. angry\n2. furious: right"
    ends = [
        "yes, it is late\nReply with Yes or No only.\nassistant:",
        f"Which team?\n{options}\nReply with the label of the option that fits best.\nassistant:",
        f"How angry?\n{levels}\nReply with the number of the level that fits best.\nassistant:",
    ]
    assert sorted(Judge.prompts) == sorted(start + end for end in ends)


async def test_four_hundred_questions_compute_their_input_once() -> None:
    text = "\n".join(CONTEXT)
    questions = [{"type": "predicate", "instructions": f"Is it {i}?"} for i in range(400)]
    async with served(runner=Judge, num_blocks=1 << 12) as server:
        response = await decide(server, questions, input=text)
        stats = await server.engine.stats()
        usage = response.json()["usage"]
        again = (await decide(server, questions[:1], input=text)).json()["usage"]
        assert server.service.admission.num_waiting_tokens == 0
    assert len(response.json()["answers"]) == 400
    prompts = [each.encode() for each in Judge.prompts[:400]]
    prefix = next(i for i, column in enumerate(zip(*prompts, strict=False)) if len({*column}) > 1)
    prefix -= len("Question: Is it ")
    ends = sum(len(each) - prefix for each in prompts)
    assert stats.num_queried_tokens == 400 * prefix + ends
    # The last block of the input is part of another one in each prompt.
    assert stats.num_queried_tokens - stats.num_hit_tokens <= prefix + ends + 400 * 31
    assert stats.num_prefix_waits > 0
    assert (usage["input_tokens"], usage["output_tokens"]) == (prefix + ends, 400)
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert again["input_tokens_details"]["cached_tokens"] >= prefix - 31


async def test_a_session_retains_the_input_and_no_question() -> None:
    text = "\n".join(CONTEXT)
    async with served(runner=Judge, num_blocks=256) as server:
        response = await decide(server, input=text, prompt_cache_key="me")
        stats = await server.engine.stats()
    details = response.json()["usage"]["input_tokens_details"]
    prefix = len(Judge.prompts[0].partition("Question: ")[0])
    assert details == {"cached_tokens": 0, "cache_write_tokens": prefix}
    assert stats.num_retained_blocks == prefix // 32


async def test_the_input_may_be_a_conversation_with_calls_and_json() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "d", "name": "run", "input": "x"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be strict."}]},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See", "prompt_cache_breakpoint": None},
                {"type": "input_json", "data": [{"a": 1}]},
            ],
        },
        call,
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        custom,
        {"type": "custom_tool_call_output", "call_id": "d", "output": "wind"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wet."}], "phase": None},
    ]
    part = {"type": "input_json", "data": {"limit": 3}}
    asked = [{**PREDICATE, "instructions": [{"type": "input_text", "text": "yes"}, part]}]
    async with served(runner=Judge) as server:
        response = await decide(server, asked, input=items)
    assert response.status_code == 200, response.text
    (prompt,) = Judge.prompts
    shown = [
        f"system: {INSTRUCTIONS}\nBe strict.\n",
        'user: See\n[{"a": 1}]\n',
        "rain",
        "wind",
        "assistant: Wet.\n",
        'user: Question: yes\n{"limit": 3}\nReply',
    ]
    positions = [prompt.find(each) for each in shown]
    assert -1 not in positions
    assert positions == sorted(positions)


DEEP: Any = {"a": 1}
for _ in range(33):
    DEEP = {"a": DEEP}


def json_part(data: Any) -> dict[str, Any]:
    parts = [{"type": "input_json", "data": data}]
    return {"input": [{"role": "user", "content": parts}]}


def of(question: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"questions": [question | fields]}


TWICE = [{"value": "a"}, {"value": "a", "description": "b"}]


@rows(
    ("fields", "param", "message"),
    [
        ({"questions": []}, "questions", "at least 1"),
        ({"questions": [PREDICATE] * 401}, "questions", "400"),
        (of(PREDICATE, type="box"), "questions.0.type", "'box' is not supported"),
        (of(PREDICATE, instructions=[{"type": "input_image"}]), "questions.0.instructions", "only text"),
        (of(CHOICE, choices=[{"value": "a"}]), "questions.0.choices", "at least 2"),
        (of(CHOICE, choices=TWICE), "questions.0.choices", "unique"),
        (of(CHOICE, choices=[{"value": 1}, {"value": "a"}]), "questions.0.choices.0.value", "a string or a boolean"),
        (of(CHOICE, choices=[{"value": str(i)} for i in range(256)]), "questions.0.choices", "255"),
        (of(CHOICE, choices=[{"value": str(i)} for i in range(27)]), "questions.0", "26 options at most"),
        (of(SCORE, levels=[{"label": "a"}] * 11), "questions.0.levels", "10"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [PREDICATE] * 8193}, "input", "8192"),
        ({"input": [{"type": "reasoning"}]}, "input.0.type", "'reasoning' is not supported"),
        ({"input": ["Hi"]}, "input.0", "must be an object"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input.0.call_id", "no call"),
        ({"input": 1}, "input", "list"),
        (json_part([1]), "input.0.content", "an array of objects"),
        (json_part(DEEP), "input.0.content", "32 levels"),
        (json_part([{}] * 10_001), "input.0.content", "10000 values"),
        (json_part({"a": "b" * (1 << 18)}), "input.0.content", "262144"),
        ({"input": "a" * 8000}, "questions.0", "maximum context length"),
        (of(PREDICATE, instructions="a" * 2000), "questions.0", "maximum context length"),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_is_rejected_by_its_name(
    fields: dict[str, Any], param: str | None, message: str
) -> None:
    async with served(runner=Judge) as server:
        found = await error(server, **fields)
        assert server.service.admission.num_requests == 0
    assert found[0] == param
    assert message in found[1]


async def test_all_questions_together_have_as_many_tokens_as_may_wait() -> None:
    async with served(runner=Judge, max_queued_tokens=600) as server:
        assert (await decide(server)).status_code == 200
        param, message = await error(server, QUESTIONS * 3)
    assert (param, "600 tokens" in message) == ("questions", True)


async def test_a_question_is_a_turn_of_its_own_behind_the_assistants() -> None:
    items = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    async with served(runner=Judge) as server:
        assert (await decide(server, [PREDICATE], input=items)).status_code == 200
    assert "assistant: Ho\nuser: Question: yes" in Judge.prompts[0]


def test_gpt_oss_answers_in_its_final_channel() -> None:
    tokenizer = harmony_tokenizer()
    model = ModelInfo("gpt-oss", tokenizer, tokenizer.end_token_ids, tokenizer.num_tokens, 4096)
    question = Question(
        param="q", kind="truth", instructions="Is it?", options=(Option(""), Option(""))
    )
    made = question_prompts(model, [ChatMessage(role="user", content="Hi")], [question], {}, 4096)
    text = tokenizer.decode(made.ends[0].token_ids)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>")


async def test_a_line_of_a_batch_is_answered() -> None:
    body = {"model": MODEL_ID, "input": "It is late.", "questions": QUESTIONS}
    line = {"custom_id": "a", "method": "POST", "url": PATH, "body": body}
    async with served(runner=Judge) as server:
        batch = await run(server, [line], endpoint=PATH)
        (record,) = await records(server, batch["output_file_id"])
    assert check_shape(record["response"]["body"], Decision).answers[1].type == "choice"


class Forgetful(ByteTokenizer):
    """Its template has no message."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        return "Hi"


class Thinking(ByteTokenizer):
    """Its template begins to reason, whatever is asked of it."""

    think_start, think_end = "<think>", "</think>"

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        return super().apply_chat_template(conversation, tokenize=False) + "<think>\n"


class Joining(ByteTokenizer):
    """Joins the break before a question to it, as one token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.replace("\nQuestion", "\tuestion"))


async def test_a_template_without_the_question_answers_none() -> None:
    async with served(runner=Judge, tokenizer=Forgetful()) as server:
        param, message = await error(server)
    assert (param, "leaves out the last message" in message) == ("model", True)


async def test_an_answer_stands_behind_reasoning() -> None:
    async with served(runner=Judge, tokenizer=Thinking()) as server:
        assert (await decide(server, [PREDICATE])).status_code == 200
    assert Judge.prompts[0].endswith("assistant:<think>\n</think>\n\n")


async def test_a_question_is_read_also_where_its_beginning_is_tokenized_differently() -> None:
    async with served(runner=Judge, tokenizer=Joining()) as server:
        response = await decide(server, [PREDICATE])
    assert response.status_code == 200, response.text
    assert "It is late.\n\nQuestion: yes" in Judge.prompts[0]


async def test_a_deadline_ends_all_questions() -> None:
    async with served(runner=Judge) as server:
        response = await decide(server, timeout=1e-9)
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert await server.num_unfinished() == 0
