"""A conversation, independent of the API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from app.parsing.tool_spec import ToolChoice, ToolSpec

# `system`, `developer`, `user`, `assistant`, `tool`, or any other that a template knows.
Role = str

SYSTEM_ROLES: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made before; `arguments` should be the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


class Breakpoint(NamedTuple):
    """The end of what is to be retained: so many characters of a content, and for how long."""

    num_characters: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation.

    name: the participant's name.
    tool_calls: the calls that the assistant made.
    tool_call_id: the call whose result the message is; for the role `tool`.
    breakpoints: where what is to be retained ends, in the order of the content.
    """

    role: Role
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    breakpoints: Sequence[Breakpoint] = ()

    def template_fields(self) -> dict[str, Any]:
        """Return what a chat template takes; few know OpenAI's newer name of the system role."""
        role = "system" if self.role == "developer" else self.role
        optional = {"name": self.name, "reasoning_content": self.reasoning}
        present = {name: value for name, value in optional.items() if value is not None}
        return {"role": role, "content": self.content} | present


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of a chat template.

    reasoning_effort: OpenAI's, `none` to `max`; None leaves it to the template.
    thinking: whether the model reasons; None leaves it to the template and the effort.
    thinking_budget: the most tokens of reasoning; None is no limit.
    template_kwargs: further variables of the template, from the request.
    add_generation_prompt: end the prompt where the assistant's message begins.
    continue_final_message: the completion continues the last message.
    adapt_turns: render messages in an order that the template rejects in another role, where they are;
        otherwise the template decides.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice = "none"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking: bool | None = None
    thinking_budget: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    adapt_turns: bool = False

    @property
    def thinking_switch(self) -> bool | None:
        """Whether the model reasons, by `thinking` or a budget of nothing; None leaves it to the template."""
        is_off = self.thinking is None and self.thinking_budget == 0
        return False if is_off else self.thinking

    @property
    def thinking_limit(self) -> int | None:
        """The most tokens of reasoning: not every template can leave out what is not wanted."""
        if self.thinking_budget is not None:
            return self.thinking_budget
        is_off = self.thinking is None and self.reasoning_effort == "none"
        return 0 if is_off or self.thinking is False else None

    @property
    def offered_tools(self) -> Sequence[ToolSpec]:
        """The tools that the model may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def described_tools(self) -> Sequence[ToolSpec]:
        """The offered tools that the template describes."""
        return [tool for tool in self.offered_tools if not tool.deferred]
