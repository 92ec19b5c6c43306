"""What a gate or a bench is asked, and what it has found."""

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Any, Final

Cell = str | int | float


class Status(StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    MEASURED = "measured"
    SKIPPED = "skipped"
    CRASHED = "CRASHED"
    TIMED_OUT = "TIMED OUT"


# Nothing of these has to be repaired.
GOOD: Final = frozenset({Status.PASS, Status.MEASURED, Status.SKIPPED})


class Skipped(Exception):
    """A check cannot run here, and why."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a check.

    is_quick: tiny sizes, which show that it runs.  seconds: how long it may take.
    """

    device: str = "gpu"
    is_quick: bool = False
    seconds: float = 60.0


@dataclass
class Record:
    """The findings of a check: a table, remarks, and what is wrong.

    It is written to a file after each row, so that what was found before a crash is not lost.
    """

    header: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    status: Status | None = None
    path: Path | None = None
    deadline: float = field(default_factory=lambda: monotonic() + 3600)

    def table(self, *header: str) -> None:
        self.header = [*header]

    def row(self, *cells: Cell) -> None:
        assert len(cells) == len(self.header), "a cell for each column"
        self.rows.append([*cells])
        self.save()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
        self.save()

    def expect(self, is_right: bool, failure: str) -> str:
        """Return the verdict as a cell; a failure fails the gate."""
        if not is_right:
            self.failures.append(failure)
        return "pass" if is_right else "**FAIL**"

    @property
    def seconds_left(self) -> float:
        return self.deadline - monotonic()

    def save(self) -> None:
        if self.path is None:
            return
        known: dict[str, Any] = asdict(self) | {"path": None, "deadline": 0.0}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(known), encoding="utf-8")
        new.replace(self.path)

    @classmethod
    def load(cls, path: Path) -> "Record":
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["status"] is not None:
            known["status"] = Status(known["status"])
        return cls(**known)
