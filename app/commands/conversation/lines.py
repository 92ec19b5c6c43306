"""Reads messages from the terminal, with line editing and a history that outlives the process."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROMPT: Final = ">>> "
_CONTINUED: Final = "... "
_QUOTES: Final = '"""'
_MAX_LINES: Final = 1000
_OWNER_ONLY: Final = 0o600


class History:
    """The lines of earlier conversations, in a file that only its owner can read.

    Each line is appended when it is entered, so that several terminals share the file.  Where it cannot be
    written, lines are forgotten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        """Return the last lines, and forget the others."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        except OSError:
            return []
        kept = lines[-_MAX_LINES:]
        if len(kept) < len(lines):
            self._write(kept, os.O_TRUNC)
        return kept

    def add(self, entry: str) -> None:
        self._write(entry.splitlines(), os.O_APPEND)

    def _write(self, lines: list[str], flag: int) -> None:
        def open_private(path: str, flags: int) -> int:
            return os.open(path, flags | flag, _OWNER_ONLY)

        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = "w" if flag == os.O_TRUNC else "a"
            with open(
                self._path, mode, encoding="utf-8", errors="replace", opener=open_private
            ) as file:
                file.writelines(f"{line}\n" for line in lines)


class MessageReader:
    """Reads messages: a line, lines that a backslash joins, or lines between triple quotes."""

    def __init__(self, history: History | None, read: Callable[[str], str] = input) -> None:
        self._history = history
        self._read = read
        recall(history.read() if history else [])

    def read_message(self) -> str:
        """Return the next message.

        Raises:
            EOFError: the input has ended.
            KeyboardInterrupt: the user gives the message up.
        """
        text = self._read_line(_PROMPT)
        if text.lstrip().startswith(_QUOTES):
            return self._quoted(text.lstrip().removeprefix(_QUOTES))
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{self._read_line(_CONTINUED)}"
        return text.strip()

    def _quoted(self, text: str) -> str:
        while not text.rstrip().endswith(_QUOTES):
            text = f"{text}\n{self._read_line(_CONTINUED)}"
        return text.rstrip().removesuffix(_QUOTES).strip()

    def _read_line(self, prompt: str) -> str:
        line = self._read(prompt)
        if self._history and line.strip():
            self._history.add(line)
        return line


def recall(lines: list[str]) -> None:
    """Let the user edit lines, and go back to these."""
    try:
        import readline
    except ImportError:
        # A Python that was built without it.
        return
    readline.clear_history()
    for line in lines:
        readline.add_history(line)
