"""The format in which a model writes a message: reasoning, content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.parsing.output_format import GrammarSpec, OutputFormat
from app.parsing.tool_spec import ToolChoice, ToolSpec, must_call


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec:
    """The kinds of text that a message may contain.

    tools: the tools that may be called.
    content: the grammar of the content; None allows any text.
    begun: the beginning of the message, if the prompt ends with it.
    thinking_budget: the most tokens of reasoning; None is no limit.
    """

    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice = "none"
    is_parallel: bool = True
    content: GrammarSpec | None = None
    begun: str = ""
    thinking_budget: int | None = None

    @property
    def is_call(self) -> bool:
        """True if the message must call a tool."""
        return bool(self.tools) and must_call(self.tool_choice)


class HistoryFormat(Protocol):
    """How the turns of a conversation are passed to the model's template."""

    @property
    def is_native(self) -> bool:
        """True if the chat template takes tools, and writes calls and results itself."""
        ...

    @property
    def num_id_characters(self) -> int | None:
        """How long a call's id is in the template, if that is fixed."""
        ...


class MessageFormat(HistoryFormat, Protocol):
    @property
    def has_channels(self) -> bool:
        """True if the template is that of gpt-oss."""
        ...

    def output(self, spec: MessageSpec, prompt: str) -> OutputFormat:
        """Return how the completion of a rendered prompt is constrained and parsed.

        Raises:
            InvalidRequest: the model cannot write such a message.
        """
        ...
