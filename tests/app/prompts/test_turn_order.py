"""Turns that a template does not take are rendered in another role, where they are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jinja2
import pytest
from mlx_lm.tool_parsers import json_tools

from app.parsing.formats.model_format import message_format
from app.parsing.tool_spec import ToolSpec
from app.prompts.conversation import ChatMessage, Conversation, ToolCall
from app.prompts.render import chat_prompt
from app.prompts.templates import model_template, template_process
from app.prompts.templates.template_sandbox import RendererLost
from app.prompts.turn_order import TurnOrder, adapted_turns, turn_order
from batching import ModelInfo, Sandbox, SandboxLimits
from tests.support.marker_tokenizer import MarkerTokenizer
from tests.support.rows import rows
from tests.support.speaker import END, VOCAB_SIZE, ByteTokenizer

CHATML: Final = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ALTERNATING: Final = """\
{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}\
{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
MOVING: Final = """\
{% for m in messages %}{% if m.role == 'system' %}[system]{{ m.content }}{% endif %}{% endfor %}\
{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
WITHOUT_SYSTEM: Final = """\
{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}\
[{{ m.role }}]{{ m.content }}{% endfor %}"""
WITHOUT_SYSTEM_TEXT: Final = """\
[user]<system>
Be brief.
</system>
Hi
<system>
It is late.
</system>[assistant]Hello[user]Hi"""
SYSTEM_TOOLS: Final = "[user]<system>\nBe brief.\n\n# Tools"
# It takes tools, and no user right after their results.
STRICT_TOOLS: Final = """\
{% for m in messages %}{% if m.role == 'user' and not loop.first \
and loop.previtem.role == 'tool' %}{{ raise_exception('order') }}{% endif %}\
[{{ m.role }}]{{ m.content }}{% endfor %}{{ '' if tools else '' }}"""


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class Templated(ByteTokenizer):
    def __init__(self, template: str, *, has_tools: bool = False) -> None:
        self.chat_template = template
        if has_tools:
            self.tool_call_start, self.tool_call_end = "<tool_call>", "</tool_call>"
            self.tool_parser = json_tools.parse_tool_call

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **kwargs: Any
    ) -> Any:
        template = jinja2.Template(self.chat_template or "")
        return template.render(messages=conversation, raise_exception=refuse)


def model_with(template: str, *, has_tools: bool = False) -> ModelInfo:
    tokenizer = Templated(template, has_tools=has_tools)
    return ModelInfo("m", tokenizer, frozenset({END}), VOCAB_SIZE, 4096)


def rendered(model: ModelInfo, *messages: ChatMessage) -> str:
    conversation = Conversation(messages=messages, adapt_turns=True)
    return chat_prompt(model, conversation, message_format(model)).text


SYSTEM: Final = ChatMessage(role="system", content="Be brief.")
USER: Final = ChatMessage(role="user", content="Hi")
ASSISTANT: Final = ChatMessage(role="assistant", content="Hello")
REMINDER: Final = ChatMessage(role="system", content="It is late.")
CALLING: Final = ChatMessage(role="assistant", content="", tool_calls=(ToolCall("c", "f", "{}"),))
RESULT: Final = ChatMessage(role="tool", content="42", tool_call_id="c")


def test_a_process_without_an_answer_says_nothing_of_a_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = MarkerTokenizer()
    model = replace(tokenizer.model, has_jinja_template=True)
    monkeypatch.setattr(tokenizer, "get_chat_template", lambda *_: CHATML, raising=False)
    with monkeypatch.context() as patched:
        late = Sandbox(template_process.__file__, SandboxLimits(1), wall_seconds=0)
        patched.setattr(model_template, "SANDBOX", late)
        with pytest.raises(RendererLost):
            rendered(model, SYSTEM, USER)
    assert turn_order(model) == TurnOrder(True, True, True)


@rows(
    ("template", "order"),
    [
        (CHATML, TurnOrder(True, True, True)),
        (ALTERNATING, TurnOrder(True, False, True)),
        (MOVING, TurnOrder(True, False, True)),
        (WITHOUT_SYSTEM, TurnOrder(False, False, True)),
    ],
)
def test_a_template_is_judged_by_what_it_renders(template: str, order: TurnOrder) -> None:
    assert turn_order(model_with(template)) == order


@rows(
    ("template", "text"),
    [
        (CHATML, "[system]Be brief.[user]Hi[system]It is late.[assistant]Hello[user]Hi"),
        *(
            (
                template,
                "[system]Be brief.[user]Hi\n<system>\nIt is late.\n</system>[assistant]Hello[user]Hi",
            )
            for template in (ALTERNATING, MOVING)
        ),
        (WITHOUT_SYSTEM, WITHOUT_SYSTEM_TEXT),
    ],
)
def test_a_system_message_in_the_middle_stays_there(template: str, text: str) -> None:
    model = model_with(template)
    messages = [SYSTEM, USER, REMINDER, ASSISTANT, USER]
    assert rendered(model, *messages) == text
    assert text.startswith(rendered(model, *messages[:4]))


@pytest.mark.parametrize("adapt_turns", [True, False])
def test_tools_are_described_to_the_user_where_no_system_message_is_taken(
    adapt_turns: bool,
) -> None:
    """The system message that describes them may be none of the client's."""
    model = model_with(WITHOUT_SYSTEM)
    for messages, begin in (([USER], "[user]<system>\n# Tools"), ([SYSTEM, USER], SYSTEM_TOOLS)):
        conversation = Conversation(
            messages=messages,
            tools=[ToolSpec("now", {})],
            tool_choice="auto",
            adapt_turns=adapt_turns,
        )
        text = chat_prompt(model, conversation, message_format(model)).text
        assert text.startswith(begin)
        assert text.endswith("\n</system>\nHi")
        assert text.count("[user]") == 1


def test_adjacent_turns_of_one_role_are_joined() -> None:
    thinking = ChatMessage(role="assistant", content="", reasoning="Hm.")
    asking = ChatMessage(role="developer", content="Ask.")
    turns = [SYSTEM, asking, USER, USER, thinking, ASSISTANT, CALLING, RESULT, RESULT]
    assert adapted_turns(model_with(CHATML), turns) == [
        ChatMessage(role="system", content="Be brief.\nAsk."),
        ChatMessage(role="user", content="Hi\nHi"),
        ChatMessage(
            role="assistant", content="Hello", reasoning="Hm.", tool_calls=CALLING.tool_calls
        ),
        RESULT,
        RESULT,
    ]


def test_a_users_turn_after_a_result_becomes_its_part_where_the_template_wants_that() -> None:
    strict = model_with(STRICT_TOOLS, has_tools=True)
    turns = [USER, CALLING, RESULT, USER, REMINDER]
    text = "[user]Hi[assistant][tool]42"
    assert turn_order(strict) == TurnOrder(True, True, False)
    assert rendered(strict, *turns) == f"{text}\nHi[system]It is late."
    assert rendered(model_with(CHATML, has_tools=True), *turns[:4]) == (
        '[user]Hi[assistant]<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\n42\n</tool_response>\nHi"
    )


def test_deferred_tools_are_not_described_by_the_template() -> None:
    tools = [ToolSpec("now", {}), ToolSpec("later", {}, deferred=True)]
    conversation = Conversation(messages=[USER], tools=tools, tool_choice="auto")
    model = model_with(CHATML)
    text = chat_prompt(model, conversation, message_format(model)).text
    assert '"now"' in text
    assert "later" not in text
    assert conversation.offered_tools == tools
