"""A model's own chat template: rendered as transformers does, and ended when it takes too much."""

import asyncio
import io
import json
import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import PreTrainedTokenizerFast

from app.parsing.formats.model_format import message_format
from app.prompts import model_template, template_process
from app.prompts.conversation import ChatMessage, Conversation
from app.prompts.model_template import render_turns
from app.prompts.render import chat_prompt
from app.prompts.render_pool import RendererLost, RenderPool, TemplateFailed, TemplateTooMuch
from app.prompts.template_process import answer_lines, limit_cpu
from app.prompts.turn_order import turn_order
from batching import Interruption, InvalidRequest, ModelInfo
from batching.interruption import Interrupted
from scripts.server_process import wait_until
from tests.support.byte_tokenizers import byte_vocabulary
from tests.support.speaker import ByteTokenizer, served

TURNS: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": " Hí "},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"é": [1, None]}}}],
    },
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "  Well  "},
]
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}[{{ m | tojson }}]{% endfor %}{{ tools | tojson }}"
    "{{ enable_thinking }}{{ tone }}{% if add_generation_prompt %}assistant:{% endif %}"
)
# Bound to be ended, by the seconds of a core or by memory.
HOSTILE: Final = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{% set ns = namespace(a='aaaa') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{{ '%9999999999d' % 1 }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ lipsum(n=9999999) }}",
    "{{ 'a' * 10 ** 8 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% include 'a' %}",
]


class Templated(ByteTokenizer):
    """Has a template as Hugging Face's tokenizers have one."""

    special_tokens_map = {"bos_token": "<s>"}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        self.chat_template = self._template = template

    def get_chat_template(self, name: str | None, tools: Any) -> str:
        assert name is None
        return self._template


def model(template: str) -> ModelInfo:
    tokenizer = Templated(template)
    return ModelInfo("m", tokenizer, frozenset(), 260, 4096, has_jinja_template=True)


@pytest.fixture
def pool() -> Iterator[RenderPool]:
    made = RenderPool(1, cpu_seconds=1)
    yield made
    made.close()


@pytest.mark.parametrize("thinks", [True, False])
def test_it_is_rendered_as_transformers_does(*, thinks: bool) -> None:
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    tokenizer = make(tokenizer_object=byte_vocabulary(["<s>"]), bos_token="<s>")
    tokenizer.chat_template = TEMPLATE
    variables: dict[str, Any] = {"add_generation_prompt": True, "tools": TOOLS, "tone": "!"}
    variables["enable_thinking"] = thinks
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False, **variables)
    assert render_turns(model(TEMPLATE), TURNS, **variables) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_know(name: str) -> None:
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    turns = [{"role": "assistant", "content": "", name: "Hm."}]
    assert render_turns(model(template), turns) == "Hm.Hm."


def test_a_template_decides_what_a_request_leaves_open() -> None:
    assert render_turns(model("{{ enable_thinking is defined }}{{ tools }}"), TURNS) == "FalseNone"


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_ends_in_time_with_an_error(template: str, pool: RenderPool) -> None:
    with pytest.raises(TemplateFailed):
        pool.render(template, TURNS, {})
    assert pool.render("{{ messages | length }}", TURNS, {}) == "5"


def test_the_request_gets_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with RenderPoolOf(monkeypatch, cpu_seconds=0):
        hostile = model(HOSTILE[0])
        conversation = Conversation(messages=[ChatMessage(role="user", content="Hi")])
        with pytest.raises(InvalidRequest, match="took too much time or memory") as raised:
            chat_prompt(hostile, conversation, message_format(hostile))
        assert raised.value.param == "messages"
        # What a template takes is found out by rendering: that is bounded, too.
        with pytest.raises(TemplateTooMuch):
            turn_order(hostile)


@pytest.mark.anyio
async def test_the_server_serves_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with RenderPoolOf(monkeypatch, cpu_seconds=1):
        async with served(tokenizer=Templated(HOSTILE[0])) as server:
            stuck = asyncio.create_task(server.chat())
            for _ in range(3):
                assert (await server.complete()).status_code == 200
                assert (await server.client.get("/health")).status_code == 200
            assert not stuck.done()
            response = await stuck
    assert response.status_code == 400
    assert "it took too much time or memory" in response.json()["error"]["message"]


@pytest.mark.anyio
async def test_a_prompt_is_rendered_by_the_process() -> None:
    async with served(tokenizer=Templated("{{ bos_token }}{{ messages[0].content }}")) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        rendered = await server.post("/v1/chat/completions/render", body)
    assert rendered.json()["prompt"] == "<s>Hi"


def test_a_template_says_why_it_rejects() -> None:
    rejecting = model("{{ raise_exception('no system, please') }}")
    echoing = model("{{ raise_exception(messages[0].content) }}")
    conversation = Conversation(messages=[ChatMessage(role="user", content="a secret")])
    with pytest.raises(InvalidRequest, match=r"rejects the messages: no system, please"):
        chat_prompt(rejecting, conversation, message_format(rejecting))
    with pytest.raises(InvalidRequest, match=r"fails with this request \(TemplateError\)$"):
        chat_prompt(echoing, conversation, message_format(echoing))


class RenderPoolOf:
    """A pool in place of that of the server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.pool = RenderPool(1, **options)
        monkeypatch.setattr(model_template, "POOL", self.pool)

    def __enter__(self) -> RenderPool:
        return self.pool

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def test_others_are_rendered_while_one_is_stuck() -> None:
    pool = RenderPool(2, cpu_seconds=1)
    try:
        with ThreadPoolExecutor() as threads:
            stuck = threads.submit(pool.render, HOSTILE[0], TURNS, {})
            assert [pool.render("{{ 6 * 7 }}", TURNS, {}) for _ in range(50)] == ["42"] * 50
            assert not stuck.done()
            with pytest.raises(TemplateTooMuch):
                stuck.result()
    finally:
        pool.close()


def test_time_that_is_over_before_it_is_sent_is_not_exceeded(pool: RenderPool) -> None:
    (process,) = pool._processes
    with pytest.raises(RendererLost):
        process.ask(b"[]", -1)
    assert process._process is None


def test_a_process_that_does_not_get_on_is_not_the_requests_fault() -> None:
    pool = RenderPool(1, wall_seconds=0.1)
    try:
        pool.warm_up()
        (process,) = pool._processes
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGSTOP)
        with pytest.raises(RendererLost):
            pool.render("a", TURNS, {})
    finally:
        pool.close()


def test_a_process_that_was_killed_is_replaced(pool: RenderPool) -> None:
    pool.warm_up()
    (process,) = pool._processes
    first = process._process
    assert first is not None
    pool.warm_up()
    assert process._process is first
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert pool.render("a", TURNS, {}) == "a"


def test_signals_of_a_terminal_do_not_end_it(pool: RenderPool) -> None:
    assert pool.render("a", TURNS, {}) == "a"
    (process,) = pool._processes
    first = process._process
    assert first is not None
    os.kill(first.pid, signal.SIGINT)
    os.kill(first.pid, signal.SIGTERM)
    assert pool.render("a", TURNS, {}) == "a"
    assert process._process is first


def test_it_has_the_servers_time_zone(pool: RenderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def there() -> str:
        return (datetime.now(UTC) + timedelta(hours=3)).strftime("%H:%M")

    monkeypatch.setenv("TZ", "XYZ-3")
    before = there()
    assert pool.render("{{ strftime_now('%H:%M') }}", TURNS, {}) in (before, there())


def test_a_long_conversation_makes_a_long_text(pool: RenderPool) -> None:
    turns = [{"role": "user", "content": "a" * (5 << 20)}]
    assert len(pool.render("{{ messages[0].content }}", turns, {})) == 5 << 20


def test_a_line_is_answered_with_a_line() -> None:
    lines = io.BytesIO(b"".join(json.dumps([t, TURNS, {}]).encode() + b"\n" for t in ("a", "\n")))
    answers, limited = io.BytesIO(), []
    answer_lines(lines, answers, lambda: limited.append(1))
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"text": "a"},
        {"text": ""},
    ]
    assert len(limited) == 2


def test_a_process_has_its_seconds_from_now_on() -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    limit_cpu(5, lambda kind, limit: limits.append((kind, limit)))
    [(kind, (soft, hard))] = limits
    assert (kind, hard) == (resource.RLIMIT_CPU, resource.RLIM_INFINITY)
    assert soft >= 6


def test_the_process_needs_no_module_of_the_project() -> None:
    source = Path(template_process.__file__).read_text(encoding="utf-8")
    assert "from app" not in source
    assert "from batching" not in source


def test_a_rendering_ends_when_its_caller_gives_up() -> None:
    """The process is killed for it, and the next one is rendered by another."""
    pool, interruption = RenderPool(1, cpu_seconds=1000, wall_seconds=1000), Interruption()
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with ThreadPoolExecutor(1) as threads:
        rendering = threads.submit(interruption.run, lambda: pool.render(endless, [], {}))
        wait_until(lambda: interruption._end is not None, "it is not rendered")
        interruption.interrupt()
        with pytest.raises(Interrupted):
            rendering.result(20)
    assert pool.render("{{ a }}", [], {"a": "b"}) == "b"
    pool.close()
    # As one that gives up when the server has ended.
    pool._processes[0]._kill()
