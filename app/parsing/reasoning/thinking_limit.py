"""How the end of a model's reasoning is forced when its budget is used up."""

import re
from typing import NamedTuple

from app.parsing.grammars.marker_tokens import token_of
from app.parsing.reasoning.reasoning_markers import ReasoningMarkers
from batching import ThinkingLimit, Tokenizer


class Closing(NamedTuple):
    """The marker that is forced, and what the model is used to around it."""

    before: str
    marker: str
    after: str

    def tokens(self, tokenizer: Tokenizer) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
        """Return the tokens of the rest for each beginning of it that may be there already."""
        text = "".join(self)
        num_begun = len(self.before)
        if token_of(tokenizer, self.marker) is None:
            num_begun += len(self.marker) - 1
        return tuple(
            (text[:n].encode(), tuple(tokenizer.encode(text[n:], add_special_tokens=False)))
            for n in reversed(range(num_begun + 1))
        )


def marked_limit(
    num_tokens: int,
    markers: ReasoningMarkers,
    tokenizer: Tokenizer,
    *,
    begun: str,
    is_first_only: bool,
) -> ThinkingLimit:
    """Return the limit of a model that sets its reasoning off by markers.

    begun: what the prompt has of the message.
    is_first_only: the content may be a call or a document, in which a marker is text.
    """
    return ThinkingLimit(
        num_tokens=num_tokens,
        start=markers.start.encode(),
        ends=(markers.end.encode(),),
        closings=_closing(markers, tokenizer).tokens(tokenizer),
        begun=begun.encode(),
        is_first_only=is_first_only,
    )


def _closing(markers: ReasoningMarkers, tokenizer: Tokenizer) -> Closing:
    """Return the marker with the most line breaks that the template has around it, behind some reasoning."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    start, end = map(re.escape, (markers.start, markers.end))
    found = re.finditer(rf"({start})?(\n{{0,2}}){end}(\n{{0,2}})", template.replace("\\n", "\n"))
    breaks = [(match[2], match[3]) for match in found if match[1] is None]
    before, after = max(breaks, key=lambda pair: len("".join(pair)), default=("", ""))
    return Closing(before, markers.end, after)
