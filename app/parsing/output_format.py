"""How the text of a completion is constrained, and how it is parsed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.parsing.events import ContentPiece, MessageEvent
from batching import GrammarText, ThinkingLimit


class Parser(Protocol):
    """Splits the text of a model into events; see `app.parsing.events`."""

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        ...

    @property
    def has_calls(self) -> bool:
        """True if there are tool calls and all of them are complete."""
        ...

    @property
    def is_finished(self) -> bool:
        """True once all further text would be ignored, so that the generation can end."""
        ...

    def add(self, text: str) -> Sequence[MessageEvent]: ...

    def flush(self) -> Sequence[MessageEvent]: ...


class PlainText:
    """Text without markers."""

    is_plain = True
    has_calls = is_finished = False

    def add(self, text: str) -> Sequence[MessageEvent]:
        return [ContentPiece(text)] if text else []

    def flush(self) -> Sequence[MessageEvent]:
        return []


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar, and the request field that it came from, for errors.

    begun: the tokens at the end of the prompt with which the grammar begins.
    """

    grammar: GrammarText
    param: str
    begun: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How the text of a completion is constrained and parsed.

    visible_special_ids: special tokens that stay in the text because the parser looks for them.
    thinking: the limit of the reasoning; None if there is none, or no reasoning.
    """

    grammar: GrammarSpec | None = None
    new_parser: Callable[[], Parser] = PlainText
    visible_special_ids: frozenset[int] = frozenset()
    thinking: ThinkingLimit | None = None
