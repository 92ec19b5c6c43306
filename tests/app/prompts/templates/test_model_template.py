"""A model's own chat template: rendered as transformers does, and ended when it takes too much."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from transformers import PreTrainedTokenizerFast

from app.parsing.formats.model_format import message_format
from app.prompts.conversation import ChatMessage, Conversation
from app.prompts.render import chat_prompt
from app.prompts.templates import model_template, template_process
from app.prompts.templates.model_template import render_turns
from app.prompts.templates.template_sandbox import TemplateFailed, TemplateTooMuch, rendered
from app.prompts.turn_order import turn_order
from batching import InvalidRequest, ModelInfo, Sandbox, SandboxLimits
from tests.support.byte_tokenizers import byte_vocabulary
from tests.support.speaker import ByteTokenizer, served
from tests.support.weekly import weekly

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


def sandbox_of(cpu_seconds: int) -> Sandbox:
    return Sandbox(template_process.__file__, SandboxLimits(cpu_seconds), num_processes=1)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with closing(sandbox_of(cpu_seconds=0)) as made:
        yield made


@pytest.fixture
def patient_sandbox() -> Iterator[Sandbox]:
    """One in which a template lasts until others have been served, on any machine."""
    with closing(sandbox_of(cpu_seconds=3)) as made:
        yield made


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


@pytest.mark.parametrize("template", weekly(HOSTILE, 4))
def test_a_hostile_template_ends_in_time_with_an_error(template: str, sandbox: Sandbox) -> None:
    with pytest.raises(TemplateFailed):
        rendered(sandbox, template, TURNS, {})
    assert rendered(sandbox, "{{ messages | length }}", TURNS, {}) == "5"


def test_the_request_gets_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sandbox_of(cpu_seconds=0)) as sandbox:
        monkeypatch.setattr(model_template, "SANDBOX", sandbox)
        hostile = model(HOSTILE[0])
        conversation = Conversation(messages=[ChatMessage(role="user", content="Hi")])
        with pytest.raises(InvalidRequest, match="took too much time or memory") as raised:
            chat_prompt(hostile, conversation, message_format(hostile))
        assert raised.value.param == "messages"
        # What a template takes is found out by rendering: that is bounded, too.
        with pytest.raises(TemplateTooMuch):
            turn_order(hostile)


@pytest.mark.anyio
async def test_the_server_serves_others_meanwhile(
    patient_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_template, "SANDBOX", patient_sandbox)
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
        response = await server.post("/v1/chat/completions/render", body)
    assert response.json()["prompt"] == "<s>Hi"


def test_a_template_says_why_it_rejects() -> None:
    rejecting = model("{{ raise_exception('no system, please') }}")
    echoing = model("{{ raise_exception(messages[0].content) }}")
    conversation = Conversation(messages=[ChatMessage(role="user", content="a secret")])
    with pytest.raises(InvalidRequest, match=r"rejects the messages: no system, please"):
        chat_prompt(rejecting, conversation, message_format(rejecting))
    with pytest.raises(InvalidRequest, match=r"fails with this request \(TemplateError\)$"):
        chat_prompt(echoing, conversation, message_format(echoing))


def test_it_has_the_servers_time_zone(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def there() -> str:
        return (datetime.now(UTC) + timedelta(hours=3)).strftime("%H:%M")

    monkeypatch.setenv("TZ", "XYZ-3")
    before = there()
    assert rendered(sandbox, "{{ strftime_now('%H:%M') }}", TURNS, {}) in (before, there())


def test_a_long_conversation_makes_a_long_text(sandbox: Sandbox) -> None:
    turns = [{"role": "user", "content": "a" * (5 << 20)}]
    assert len(rendered(sandbox, "{{ messages[0].content }}", turns, {})) == 5 << 20
