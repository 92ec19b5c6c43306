"""Step times that `scripts.microbench` measured: `{"steps": [{"rows", "context", "seconds"}]}`."""

import json
from dataclasses import dataclass
from pathlib import Path


class BadSteps(Exception):
    """The file cannot be used; one line for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step took that computed one token for each of `rows` sequences."""

    rows: int
    context: int
    seconds: float


def load_steps(path: Path) -> list[StepTime]:
    """Read a file of step times.

    Raises:
        BadSteps: it cannot be read, or holds something else.
    """
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return [
            StepTime(int(step["rows"]), int(step["context"]), float(step["seconds"]))
            for step in steps
        ]
    except OSError as error:
        raise BadSteps(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise BadSteps(f"{path} holds no step times") from None
