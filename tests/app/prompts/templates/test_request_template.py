"""Chat templates that requests bring: rendered as transformers does, within limits."""

import json
from typing import Any, Final

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from pydantic import SecretStr
from transformers.utils.chat_template_utils import render_jinja_template

from app.prompts.templates import template_process
from app.prompts.templates.request_template import check_template, render
from app.prompts.templates.template_process import answer
from batching import InvalidRequest
from tests.support.speaker import END, ByteTokenizer, served

TURNS: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": " Hi "},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"é": [1, None]}}}],
    },
    {"role": "assistant", "content": "  Well  "},
]
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
TEMPLATES: Final = [
    (
        "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "{{ bos_token }}{{ messages | tojson }}|{{ tools | tojson(indent=2, sort_keys=true) }}",
    (
        "{% for m in messages %}\n    {% if m.tool_calls %}\n{{ m.tool_calls[0].function.arguments "
        "| tojson }}\n    {% endif %}\n{% endfor %}"
    ),
    (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if loop.last %}{% continue %}{% endif %}{{ ns.n }}{% endfor %}"
    ),
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ documents is none }}{{ missing is defined }}{{ enable_thinking }}",
    "{{ messages[2].thinking }}{{ messages[2].reasoning_content }}{{ dict(a=1).a }}",
    "{{ dict.fromkeys(['a']) }}{{ (messages | selectattr('role', 'equalto', 'user') | list)[0] }}",
]


VARIABLES: Final[dict[str, Any]] = {
    "tools": TOOLS,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "enable_thinking": True,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_rendered_as_transformers_does(template: str) -> None:
    expected: Any = render_jinja_template([TURNS], chat_template=template, **VARIABLES)
    assert template_process.render(template, TURNS, dict(VARIABLES)) == expected[0][0]


@pytest.mark.parametrize("text", ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content }} "])
def test_the_last_turn_is_continued_as_transformers_does(text: str) -> None:
    template = f"{{% for m in messages %}}<{text}>{{% endfor %}}"
    how: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected: Any = render_jinja_template([TURNS], chat_template=template, **how)
    assert template_process.render(template, TURNS, dict(how)) == expected[0][0]
    assert TURNS[-1]["content"] == "  Well  "
    with pytest.raises(TemplateError, match="is not in the prompt"):
        template_process.render("{{ messages[0].content }}", TURNS, dict(how))


def test_another_process_renders_the_same() -> None:
    variables = {"add_generation_prompt": True, "tools": TOOLS}
    expected = template_process.render(TEMPLATES[1], TURNS, dict(variables))
    assert render(TEMPLATES[1], TURNS, variables) == expected
    assert len(render("{{ strftime_now('%Y') }}", TURNS, {})) == 4


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "time"),
        ("{{ 'a' * 10**12 }}", "MemoryError"),
        ("{{ 'a' * 10**7 }}", "its text is too long"),
        ("{{ raise_exception('the roles must alternate') }}", "): the roles must alternate"),
        ("{{ raise_exception(messages[0].content) }}", "(TemplateError)"),
        ("{{ messages[99].role.x }}", "(UndefinedError)"),
        ("{% if %}", "(TemplateSyntaxError)"),
        ("{{ namespace(_a=1) }}", "(SecurityError)"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "(SecurityError)"),
        ("{{ messages.append(1) }}", "(SecurityError)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "(RecursionError)"),
        ("{% include 'x' %}", "(TypeError)"),
        ("{{ '\\ud800' }}", "(UnicodeEncodeError)"),
        ("{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}", "Error"),
    ],
)
def test_a_template_that_fails_is_the_requests_fault(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        render(template, TURNS, {})
    assert raised.value.param == "chat_template"
    assert reason in str(raised.value)
    assert "brief" not in str(raised.value)


def test_names_in_a_namespace_begin_without_an_underscore() -> None:
    assert template_process.render("{{ namespace({'a': 1}, b=2).b }}", TURNS, {}) == "2"
    with pytest.raises(SecurityError):
        template_process.render("{{ namespace(_a=1) }}", TURNS, {})


def test_the_answer_of_the_process_is_json() -> None:
    request = json.dumps(["{{ messages[0].content }}", TURNS, {}]).encode()
    assert json.loads(answer(request)) == {"text": "Be <b>brief</b>."}
    failed = json.loads(answer(json.dumps(["{{ 1 / 0 }}", TURNS, {}]).encode()))
    assert failed == {"error": "ZeroDivisionError", "message": ""}
    long = json.loads(answer(json.dumps(["{{ 'a' * 5000000 }}", TURNS, {}]).encode()))
    assert long["error"] == "its text is too long"


def test_a_template_is_checked_by_compiling_it() -> None:
    check_template("{% generation %}{{ messages }}{% endgeneration %}")
    with pytest.raises(ValueError, match="line 2: Unexpected end of template"):
        check_template("a\n{% if x %}")


class Special(ByteTokenizer):
    """Has special tokens, as a Hugging Face tokenizer shows them, and a vocabulary."""

    special_tokens_map = {"bos_token": "<s>", "eos_token": "<end>"}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(END)}


TEMPLATE: Final = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tone }}"


@pytest.mark.anyio
async def test_a_request_brings_a_template_if_the_operator_allows_it() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    body = {"messages": turns, "chat_template": TEMPLATE, "chat_template_kwargs": {"tone": "!"}}
    async with served(tokenizer=Special(), allow_request_chat_template=True) as server:
        rendered = (await server.post("/v1/chat/completions/render", body)).json()
        tokens = (await server.post("/tokenize", body)).json()
        usage = (await server.chat("Hi", chat_template=TEMPLATE)).json()["usage"]
        long = await server.chat("Hi" * 2000, chat_template=TEMPLATE)
        failed = await server.chat("Hi", chat_template="{{ raise_exception('no') }}")
        huge = await server.chat("Hi", chat_template="x" * 140_000)
    assert rendered["prompt"] == "<s>[Hi]!"
    assert tokens["tokens"] == rendered["tokens"] == list(b"<s>[Hi]!")
    assert usage["prompt_tokens"] == len("<s>[Hi]")
    assert long.json()["error"]["code"] == "context_length_exceeded"
    for response in (failed, huge):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template"


@pytest.mark.anyio
async def test_tools_are_described_to_a_template_that_takes_none() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    async with served(allow_request_chat_template=True) as server:
        rendered = await server.post(
            "/v1/chat/completions/render", body | {"chat_template": TEMPLATE}
        )
    assert rendered.json()["prompt"].startswith("[# Tools")


@pytest.mark.anyio
async def test_without_the_setting_a_template_is_refused_by_its_name() -> None:
    async with served(api_keys=SecretStr("")) as server:
        answers = [
            (await server.chat("Hi", chat_template="x")).json(),
            (
                await server.post(
                    "/tokenize",
                    {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "x"},
                )
            ).json(),
        ]
    for refused in answers:
        assert refused["error"]["param"] == "chat_template"
        assert "MLX_SERVER_ALLOW_REQUEST_CHAT_TEMPLATE=true" in refused["error"]["message"]
