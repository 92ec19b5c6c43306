"""The calls of tools in chat responses, whole or piece by piece."""

from collections.abc import Container, Iterable

from app.api.openai.chat.response import (
    AnyCall,
    CustomCall,
    FunctionCall,
    ResponseCustomCall,
    ResponseToolCall,
)
from app.api.openai.custom_input import CustomInput
from app.parsing.events import MessageEvent, ToolCallArguments, ToolCallStart


class CallWriter:
    """Writes the calls of one response; in a stream, one call of each choice may be open.

    custom_names: the names of the tools that take text, which is taken out of the arguments.
    """

    def __init__(self, custom_names: Container[str] = ()) -> None:
        self._custom_names = custom_names
        self._open: dict[int, tuple[int, CustomInput]] = {}

    def write(self, choice: int, event: ToolCallStart | ToolCallArguments) -> list[AnyCall]:
        """Return what an event adds to a choice; the start of a call ends the one before."""
        if isinstance(event, ToolCallStart):
            return [*self.end(choice), self._start(choice, event)]
        if choice not in self._open:
            function = FunctionCall(arguments=event.text)
            return [ResponseToolCall(index=event.index, function=function)]
        index, reader = self._open[choice]
        return _pieces(index, reader.push(event.text))

    def end(self, choice: int) -> list[AnyCall]:
        """Return what is left of the open call: no more of it follows."""
        if (opened := self._open.pop(choice, None)) is None:
            return []
        index, reader = opened
        return _pieces(index, reader.flush())

    def whole(self, start: ToolCallStart, events: Iterable[MessageEvent]) -> AnyCall:
        """Return a call, whose arguments are among the events."""
        pieces = (
            event.text
            for event in events
            if isinstance(event, ToolCallArguments) and event.index == start.index
        )
        arguments = "".join(pieces)
        if start.name not in self._custom_names:
            function = FunctionCall(name=start.name, arguments=arguments)
            return ResponseToolCall(id=start.call_id, type="function", function=function)
        reader = CustomInput()
        custom = CustomCall(name=start.name, input=reader.push(arguments) + reader.flush())
        return ResponseCustomCall(id=start.call_id, type="custom", custom=custom)

    def _start(self, choice: int, start: ToolCallStart) -> AnyCall:
        index, call_id = start.index, start.call_id
        if start.name not in self._custom_names:
            function = FunctionCall(name=start.name, arguments="")
            return ResponseToolCall(index=index, id=call_id, type="function", function=function)
        self._open[choice] = index, CustomInput()
        custom = CustomCall(name=start.name, input="")
        return ResponseCustomCall(index=index, id=call_id, type="custom", custom=custom)


def _pieces(index: int, text: str) -> list[AnyCall]:
    return [ResponseCustomCall(index=index, custom=CustomCall(input=text))] if text else []
