"""Reads tool calls one character at a time, with a generator per format, and reports events."""

from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple, TypeVar

from app.parsing.markers import MarkerSearch

T = TypeVar("T")

# A generator that is sent one character for each `yield`.
Steps = Generator[None, str, T]
Write = Callable[[str], None]

BLANKS: Final = " \t\r\n"

# In characters.
_MAX_HEAD: Final = 512


class CallBegins(NamedTuple):
    """A call begins; `call_id` is the id that the model generated, which most models do not."""

    name: str
    call_id: str | None = None


class CallArguments(NamedTuple):
    text: str


class CallEnds(NamedTuple):
    """The arguments are complete; the end marker may still follow."""


class NotACall(NamedTuple):
    """Text that was read but is not a call: a start marker or "", and the text after it.

    A call may begin within that text.
    """

    marker: str
    text: str


CallEvent = CallBegins | CallArguments | CallEnds | NotACall


class NotCallSyntax(Exception):
    """The text does not continue as a call."""


class CallText:
    """The text after a start marker, and the events found in it so far.

    name: the name of a call that has not begun yet.
    """

    def __init__(self, start: str, end: str) -> None:
        self.start: Final = start
        self.end: Final = end
        self.name: str | None = None
        self._is_open = False
        # Taken next; more than one character if what they seemed to begin was not there.
        self._next = ""
        # These become content if they are not a call.
        self._marker = start
        self._unread: list[str] = []
        self._events: list[CallEvent] = []

    def peek(self) -> Steps[str]:
        """Return the next character without taking it."""
        if not self._next:
            self._next = yield
            if not self._is_open:
                self._unread.append(self._next)
        return self._next[0]

    def take(self) -> Steps[str]:
        character = yield from self.peek()
        self._next = self._next[1:]
        return character

    def put_back(self, text: str) -> None:
        """Put back text that was taken, so that it is read again."""
        self._next = text + self._next

    def after(self, skipped: str) -> Steps[str]:
        """Skip all of these characters; return the one after them without taking it."""
        while (character := (yield from self.peek())) in skipped:
            yield from self.take()
        return character

    def one_of(self, *markers: str) -> Steps[str]:
        """Take one of the markers, after blanks, or nothing; none may begin with another."""
        yield from self.after(BLANKS)
        seen = ""
        while seen not in markers:
            seen += yield from self.take()
            if not any(marker.startswith(seen) for marker in markers):
                self.put_back(seen)
                raise NotCallSyntax
        return seen

    def word(self) -> Steps[str]:
        """Take a name without quotes, after blanks."""
        yield from self.after(BLANKS)
        word = ""
        while (character := (yield from self.peek())).isalnum() or character in "_-.":
            word += yield from self.take()
        if not word or len(word) > _MAX_HEAD:
            raise NotCallSyntax
        return word

    def head(self, *markers: str) -> Steps[str]:
        """Take a short text up to a marker, and the marker."""
        parts: list[str] = []
        room = _MAX_HEAD

        def write(text: str) -> None:
            nonlocal room
            parts.append(text)
            room -= len(text)
            if room < 0:
                raise NotCallSyntax

        if (yield from self.until(*markers, self.start, write=write)) == self.start:
            raise NotCallSyntax
        return "".join(parts)

    def until(self, *markers: str, write: Write) -> Steps[str]:
        """Pass on the text up to a marker; return the marker."""
        return (yield from self.until_found(MarkerSearch(*markers), write))

    def until_found(self, search: MarkerSearch, write: Write) -> Steps[str]:
        """Pass on the text up to a marker of a search that has not begun; return the marker."""
        marker = ""
        while not marker:
            text, marker = search.push((yield from self.take()))
            write(text)
        return marker

    def begin(self, name: str, call_id: str | None = None) -> None:
        self.name, self._is_open = None, True
        self._events.append(CallBegins(name, call_id))

    def write(self, text: str) -> None:
        """Add to the arguments."""
        if text:
            self._events.append(CallArguments(text))

    def finish(self) -> None:
        self._is_open = False
        self._events.append(CallEnds())
        self.settle()

    def settle(self) -> None:
        """Regard all text taken so far as part of a call, so that it never becomes content."""
        self._marker = ""
        self._unread = [self._next]

    def give_up(self) -> None:
        """Return the text that was taken but is not a call, and what was put back, for the next reader."""
        self._events.append(NotACall(self._marker, "".join(self._unread)))

    def cut(self) -> None:
        """End with the text: a call whose name is complete is cut short; anything less is dropped."""
        if self.name is not None:
            self.begin(self.name)

    def take_events(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events


# Reads the calls up to the end marker; raises NotCallSyntax where the text is none.
Read = Callable[[CallText], Steps[None]]


class CallReader:
    """Runs a format's generator, so the result does not depend on how the text is split."""

    def __init__(self, text: CallText, steps: Steps[None]) -> None:
        self._text = text
        self._steps = steps
        self.is_done = False
        next(steps)

    def push(self, character: str) -> Sequence[CallEvent]:
        try:
            self._steps.send(character)
        except StopIteration:
            self._text.settle()
            self._end()
        except NotCallSyntax:
            self._end()
        return self._text.take_events()

    def flush(self) -> Sequence[CallEvent]:
        """Return the events held back; no more text follows."""
        self._text.cut()
        return self._text.take_events()

    def _end(self) -> None:
        self._text.give_up()
        self.is_done = True
