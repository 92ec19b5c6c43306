"""Items of a response while they are generated: each yields its events."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from app.api.openai.custom_input import CustomInput
from app.api.openai.logprobs import ChatLogprobs, TokenBytes
from app.api.openai.responses.items.input_items import new_item_id
from app.api.openai.responses.items.output_items import (
    Compaction,
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningText,
    SummaryText,
)
from app.api.openai.schemas.logprobs import TokenLogprob
from app.generation.choice import TokenWithLogprob

# An event without its number: the type, without `response.`, and its fields.
Event = tuple[str, dict[str, Any]]


class OpenItem(Protocol):
    """An item that is being generated."""

    def begin(self) -> Iterator[Event]: ...

    def add(self, text: str, tokens: Sequence[TokenWithLogprob]) -> Iterator[Event]: ...

    def end(self, status: ItemStatus) -> Iterator[Event]: ...

    def item(self, status: ItemStatus) -> OutputItem: ...


class OpenMessage:
    """Text, with the log probabilities of its tokens if `token_bytes` is given."""

    def __init__(self, token_bytes: TokenBytes | None) -> None:
        self._id = new_item_id("msg")
        self._token_bytes = token_bytes
        self._text: list[str] = []
        self._tokens: list[TokenWithLogprob] = []
        self._place = {"item_id": self._id, "content_index": 0}

    def item(self, status: ItemStatus) -> Message:
        content = [] if status == "in_progress" else [self._part()]
        return Message(
            type="message", id=self._id, role="assistant", status=status, content=content
        )

    def begin(self) -> Iterator[Event]:
        yield "content_part.added", self._place | {"part": self._part()}

    def add(self, text: str, tokens: Sequence[TokenWithLogprob]) -> Iterator[Event]:
        if self._token_bytes is not None and not self._text:
            tokens = _last_that_spell(text, tokens, self._token_bytes)
        self._text.append(text)
        self._tokens += tokens
        logprobs = self._logprobs(tokens)
        yield "output_text.delta", self._place | {"delta": text, "logprobs": logprobs}

    def end(self, status: ItemStatus) -> Iterator[Event]:
        logprobs = self._logprobs(self._tokens)
        yield "output_text.done", self._place | {"text": "".join(self._text), "logprobs": logprobs}
        yield "content_part.done", self._place | {"part": self._part()}

    def _part(self) -> OutputText:
        part = OutputText(type="output_text", text="".join(self._text), annotations=[], logprobs=[])
        if self._token_bytes is not None:
            # Events are written when more tokens have come.
            part.logprobs = ChatLogprobs(self._token_bytes, tuple(self._tokens))
        return part

    def _logprobs(self, tokens: Sequence[TokenWithLogprob]) -> Iterator[TokenLogprob]:
        """Yield log probabilities as an event is written, with the bytes that Open Responses has there."""
        if self._token_bytes is not None:
            yield from ChatLogprobs(self._token_bytes, tokens)


def _last_that_spell(
    text: str, tokens: Sequence[TokenWithLogprob], token_bytes: TokenBytes
) -> Sequence[TokenWithLogprob]:
    """Return the tokens of a text, without those of a marker before it."""
    missing, start = len(text.encode()), len(tokens)
    while missing > 0 and start:
        start -= 1
        missing -= len(token_bytes(tokens[start].token_id))
    return tokens[start:]


class OpenReasoning:
    """Reasoning as content, or as its own summary."""

    def __init__(self, seal: Callable[[str], str] | None, *, is_summary: bool) -> None:
        """`seal` seals the text; None leaves the sealed value out."""
        self._id = new_item_id("rs")
        self._seal = seal
        self._is_summary = is_summary
        # Events are named after the part and after its text.
        self._part_name, self._text_name, index = (
            ("reasoning_summary_part", "reasoning_summary_text", "summary_index")
            if is_summary
            else ("content_part", "reasoning_text", "content_index")
        )
        self._place = {"item_id": self._id, index: 0}
        self._pieces: list[str] = []

    def item(self, status: ItemStatus) -> Reasoning:
        parts = [] if status == "in_progress" else [self._part()]
        fields: dict[str, Any] = (
            {"summary": parts} if self._is_summary else {"summary": [], "content": parts}
        )
        if self._seal is not None and status != "in_progress":
            fields["encrypted_content"] = self._seal("".join(self._pieces))
        return Reasoning(type="reasoning", id=self._id, status=status, **fields)

    def begin(self) -> Iterator[Event]:
        yield f"{self._part_name}.added", self._place | {"part": self._part()}

    def add(self, text: str, tokens: Sequence[TokenWithLogprob]) -> Iterator[Event]:
        self._pieces.append(text)
        yield f"{self._text_name}.delta", self._place | {"delta": text}

    def end(self, status: ItemStatus) -> Iterator[Event]:
        is_cut = self._is_summary and status == "incomplete"
        cut = {"status": status} if is_cut else {}
        part = self._part()
        yield f"{self._text_name}.done", self._place | {"text": part.text}
        yield f"{self._part_name}.done", self._place | {"part": part} | cut

    def _part(self) -> SummaryText | ReasoningText:
        text = "".join(self._pieces)
        if self._is_summary:
            return SummaryText(type="summary_text", text=text)
        return ReasoningText(type="reasoning_text", text=text)


class OpenFunctionCall:
    """A call with JSON arguments; `fields` are its names and the id of the call."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._id = new_item_id("fc")
        self._fields = fields
        self._pieces: list[str] = []

    def item(self, status: ItemStatus) -> FunctionCall:
        arguments = "".join(self._pieces)
        return FunctionCall(
            type="function_call", id=self._id, status=status, arguments=arguments, **self._fields
        )

    def begin(self) -> Iterator[Event]:
        return iter(())

    def add(self, text: str, tokens: Sequence[TokenWithLogprob]) -> Iterator[Event]:
        self._pieces.append(text)
        yield "function_call_arguments.delta", {"item_id": self._id, "delta": text}

    def end(self, status: ItemStatus) -> Iterator[Event]:
        arguments = "".join(self._pieces)
        # openai-python 2 has the name in its type; version 3 has not, and ignores it.
        place = {"item_id": self._id, "name": self._fields["name"]}
        yield "function_call_arguments.done", place | {"arguments": arguments}


class OpenCustomCall:
    """A call of a custom tool, whose input is taken out of the arguments."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._id = new_item_id("ctc")
        self._fields = fields
        self._input = CustomInput()
        self._pieces: list[str] = []

    def item(self, status: ItemStatus) -> CustomToolCall:
        text = "".join(self._pieces)
        return CustomToolCall(type="custom_tool_call", id=self._id, input=text, **self._fields)

    def begin(self) -> Iterator[Event]:
        return iter(())

    def add(self, text: str, tokens: Sequence[TokenWithLogprob]) -> Iterator[Event]:
        return self._delta(self._input.push(text))

    def end(self, status: ItemStatus) -> Iterator[Event]:
        yield from self._delta(self._input.flush())
        yield "custom_tool_call_input.done", {"item_id": self._id, "input": "".join(self._pieces)}

    def _delta(self, text: str) -> Iterator[Event]:
        if text:
            self._pieces.append(text)
            yield "custom_tool_call_input.delta", {"item_id": self._id, "delta": text}


class OpenCompaction:
    """The summary of a conversation, which is sealed when it is whole."""

    def __init__(self, seal: Callable[[str], str]) -> None:
        self._id = new_item_id("cmp")
        self._seal = seal
        self._pieces: list[str] = []

    def item(self, status: ItemStatus) -> Compaction:
        sealed = "" if status == "in_progress" else self._seal("".join(self._pieces))
        return Compaction(type="compaction", id=self._id, encrypted_content=sealed)

    def begin(self) -> Iterator[Event]:
        return iter(())

    def add(self, text: str, tokens: Sequence[TokenWithLogprob]) -> Iterator[Event]:
        self._pieces.append(text)
        return iter(())

    def end(self, status: ItemStatus) -> Iterator[Event]:
        return iter(())
