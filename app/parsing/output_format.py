"""How the text of a completion is constrained, and how it is parsed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.parsing.events import ContentPiece, MessageEvent
from batching import GrammarText


class Parser(Protocol):
    """Splits a model's text into events."""

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        ...

    @property
    def has_calls(self) -> bool:
        """True if there are tool calls, none of them cut short."""
        ...

    @property
    def is_finished(self) -> bool:
        """True once all text that follows is ignored, so the generation may as well end."""
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
    """A grammar, and the request field that asks for it.

    begun: the tokens at the end of the prompt that the grammar begins with.
    """

    grammar: GrammarText
    param: str
    begun: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What the text of a completion follows, and how it is parsed.

    visible_special_ids: special tokens that stay in the text, because the parser looks for them.
    """

    grammar: GrammarSpec | None = None
    new_parser: Callable[[], Parser] = PlainText
    visible_special_ids: frozenset[int] = frozenset()
