"""Which markers separate a model's reasoning from its content."""

from dataclasses import dataclass
from typing import Final

from app.parsing.grammars.marker_tokens import token_of
from batching import ModelInfo, Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers that begin and end the reasoning, and those that may stand around the content after it."""

    start: str
    end: str
    opening: str = ""
    closings: tuple[str, ...] = ()

    @property
    def around_content(self) -> tuple[str, ...]:
        return (*filter(None, (self.opening,)), *self.closings)

    @property
    def all(self) -> tuple[str, ...]:
        return (self.start, self.end, *self.around_content)


# Markers that mlx-lm does not infer.
_BY_TOKEN: Final = (
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarkers("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningMarkers("◁think▷", "◁/think▷"),
)
# Models without tokens for them, in whose templates they stand.
_BY_TEMPLATE: Final = (
    *_BY_TOKEN,
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("<thought>", "</thought>"),
    ReasoningMarkers("<|begin_of_thought|>", "<|end_of_thought|>"),
    ReasoningMarkers("Here is my thought process:", "Here is my response:"),
)
_AROUND_CONTENT: Final = (
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
)
_KIMI_K3: Final = "<|open|>think<|sep|>"


def reasoning_markers(model: ModelInfo) -> ReasoningMarkers | None:
    """Return the markers of a model; None if it does not reason."""
    tokenizer = model.tokenizer
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    start, end = tokenizer.think_start, tokenizer.think_end
    if start is None or end is None:
        found = _inferred(tokenizer, template)
        if found is None:
            return None
        start, end = found.start, found.end
    if start == _KIMI_K3:
        closings = ("<|close|>response<|sep|>", "<|close|>message<|sep|>")
        return ReasoningMarkers(start, end, "<|open|>response<|sep|>", closings)
    for opening, closing in _AROUND_CONTENT:
        if opening in template and closing in template:
            return ReasoningMarkers(start, end, opening, (closing,))
    return ReasoningMarkers(start, end)


def _inferred(tokenizer: Tokenizer, template: str) -> ReasoningMarkers | None:
    for markers in _BY_TOKEN:
        if all(token_of(tokenizer, text) is not None for text in (markers.start, markers.end)):
            return markers
    for markers in _BY_TEMPLATE:
        if markers.start in template and markers.end in template:
            return markers
    return None
