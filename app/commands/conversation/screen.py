"""What a conversation writes to the terminal."""

import os
import re
from typing import Final, TextIO

_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_CLEAR_LINE: Final = "\r\x1b[K"
# A model's text must not control the terminal.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REASONING: Final = "(reasoning) "


class Screen:
    """Writes answers as they come, the reasoning dimmed, and lines of the program's own.

    A status is a line that the next output replaces; only a terminal gets one.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colors = self._is_terminal and not os.environ.get("NO_COLOR")
        self._has_status = False
        self._is_reasoning = False
        self._is_line_open = False

    def show_reasoning(self, text: str) -> None:
        if not self._is_reasoning:
            self._is_reasoning = True
            self._write(_DIM if self._has_colors else _REASONING)
        self._write_text(text)

    def show_text(self, text: str) -> None:
        if self._is_reasoning:
            self._end_reasoning()
            self._write("\n")
            # Models put blank lines between both.
            text = text.lstrip("\n")
        self._write_text(text)

    def show_status(self, text: str) -> None:
        if self._is_terminal:
            self._write(self._dimmed(_without_controls(text)))
            self._has_status = True

    def end_answer(self) -> None:
        """Leave the cursor at the beginning of a line."""
        self._end_reasoning()
        if self._is_line_open:
            self._write("\n")
            self._is_line_open = False
        self._write("")

    def show_line(self, text: str = "") -> None:
        """Write a line of the program's own."""
        self._write(f"{_without_controls(text)}\n")

    def show_note(self, text: str) -> None:
        """Write a line beside the conversation."""
        self._write(f"{self._dimmed(_without_controls(text))}\n")

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._write(_PLAIN if self._has_colors else "")
            self._is_reasoning = False
            if self._is_line_open:
                self._write("\n")
                self._is_line_open = False

    def _write_text(self, text: str) -> None:
        # Set before the writing, which Ctrl-C may interrupt.
        if shown := _without_controls(text):
            self._is_line_open = not shown.endswith("\n")
            self._write(shown)

    def _dimmed(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._has_colors else text

    def _write(self, text: str) -> None:
        cleared = _CLEAR_LINE if self._has_status else ""
        self._has_status = False
        self._out.write(cleared + text)
        self._out.flush()


def _without_controls(text: str) -> str:
    return _CONTROL.sub("", text)
