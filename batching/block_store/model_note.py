"""A note in the folder of a model that says which model it is: the folder's name is a digest."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_FILE: Final = "model.json"


class ModelNote(NamedTuple):
    """What a folder says of its model.

    model: the id with which a server has loaded it last; empty if that is not known.
    made: when the folder was made, in seconds of Unix; None if that is not known.
    """

    model: str = ""
    made: float | None = None


def write_note(folder: Path, model: str) -> None:
    """Note which model a folder has; a disk that is full keeps none."""
    made = read_note(folder).made
    text = json.dumps({"model": model, "made": time.time() if made is None else made})
    part = folder / f".{_FILE}.{os.getpid()}"
    with suppress(OSError):
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            part.rename(folder / _FILE)
        finally:
            part.unlink(missing_ok=True)


def read_note(folder: Path) -> ModelNote:
    """Return what a folder says; nothing where its note is not there, or damaged."""
    try:
        noted = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return ModelNote(str(noted["model"]), float(noted["made"]))
    except (OSError, ValueError, TypeError, KeyError):
        return ModelNote()


def delete_note(folder: Path) -> None:
    (folder / _FILE).unlink(missing_ok=True)
