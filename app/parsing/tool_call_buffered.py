"""Tool calls in any format for which there is a parse function, such as those of mlx-lm."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import BoundedSemaphore, Thread
from typing import Any, Final, TypeVar

from app.parsing.markers import MarkerSearch
from app.parsing.tool_call_reader import CallArguments, CallBegins, CallEnds, CallEvent, NotACall

# Takes the text between the markers and the tools as a template gets them; returns one call or several.
ParseCalls = Callable[[str, Sequence[Mapping[str, Any]]], Any]

# In characters.  The regular expressions of parsers may take quadratic time.
_MAX_LENGTH: Final = 64 * 1024
_MAX_PARSERS: Final = 4
_PARSE_TIMEOUT: Final = 1.0  # seconds

_T = TypeVar("_T")


class BoundedCalls:
    """Calls functions of unbounded running time, each in its own thread.

    A thread cannot be stopped, but callers wait no longer than the timeout, and at most
    `max_running` threads run at once.
    """

    def __init__(self, max_running: int) -> None:
        self._free = BoundedSemaphore(max_running)

    def call(self, function: Callable[[], _T], timeout: float) -> _T:
        """Return what the function returns; `timeout` is in seconds.

        Raises:
            TimeoutError: it takes longer, or too many others are still running.
        """
        if not self._free.acquire(timeout=timeout):
            raise TimeoutError
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            finally:
                self._free.release()

        Thread(target=run, name="tool-parser", daemon=True).start()
        return future.result(timeout)


_parsers = BoundedCalls(_MAX_PARSERS)


class BufferedCallReader:
    """Buffers the text up to the end marker, or all of it if there is none, then parses it.

    Text that ends before its end marker, is too long, takes too long or cannot be parsed is not a
    call.
    """

    def __init__(
        self,
        start: str,
        end: str,
        parse: ParseCalls,
        tools: Sequence[Mapping[str, Any]],
        *,
        calls: BoundedCalls = _parsers,
        timeout: float = _PARSE_TIMEOUT,
    ) -> None:
        self._start: Final = start
        self._search = MarkerSearch(end) if end else None
        self._parse: Final = parse
        self._tools: Final = tools
        self._calls: Final = calls
        self._timeout: Final = timeout
        self._pieces: list[str] = []
        self._length = 0
        self.is_done = False

    def push(self, character: str) -> list[CallEvent]:
        text, marker = self._search.push(character) if self._search else (character, "")
        self._pieces.append(text)
        self._length += len(text)
        if marker:
            return self._end(marker)
        return self._give_up("") if self._length > _MAX_LENGTH else []

    def flush(self) -> list[CallEvent]:
        if self._search is None:
            return self._end("")
        self._pieces.append(self._search.flush())
        return self._give_up("")

    def _end(self, marker: str) -> list[CallEvent]:
        text = "".join(self._pieces)
        try:
            parsed = self._calls.call(lambda: self._parse(text, self._tools), self._timeout)
            events = _call_events(parsed)
        # A parser may raise any exception on unexpected text.
        except Exception:
            return self._give_up(marker)
        self.is_done = True
        return events

    def _give_up(self, marker: str) -> list[CallEvent]:
        self.is_done = True
        return [NotACall("".join([self._start, *self._pieces, marker]))]


def _call_events(parsed: Any) -> list[CallEvent]:
    """Return the events for the result of one of mlx-lm's parsers.

    Raises:
        ValueError, TypeError, KeyError: it is not a call, or its arguments are not JSON.
    """
    events: list[CallEvent] = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        name, call_id, arguments = call["name"], call.get("id"), call["arguments"]
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            raise ValueError("a call has a name and an object of arguments")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        events += [CallBegins(name, call_id if isinstance(call_id, str) else None)]
        events += [CallArguments(text), CallEnds()]
    if not events:
        raise ValueError("there is no call")
    return events
