"""What an endpoint says with a generation; how it says it over the wire is not its business."""

from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from time import time
from typing import Any, Final, Protocol
from uuid import uuid4

from pydantic import BaseModel

from app.schemas.usage import Usage
from batching import FinishReason

# What decides the numbers, besides the model itself.
_PACKAGES: Final = ("mlx", "mlx-lm")


class Reply(Protocol):
    """The words of one endpoint for one generation, streamed or whole."""

    def opening(self) -> Iterable[BaseModel]: ...

    def piece(self, text: str) -> BaseModel: ...

    def closing(self, finish_reason: FinishReason, usage: Usage) -> Iterable[BaseModel]: ...

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> BaseModel: ...


def new_id(prefix: str) -> str:
    """Return the client's name for a completion."""
    return f"{prefix}-{uuid4().hex}"


def head(completion_id: str, model_id: str) -> dict[str, Any]:
    """Return the fields that a whole answer, or all chunks of one, have alike."""
    return {
        "id": completion_id,
        "created": int(time()),
        "model": model_id,
        "system_fingerprint": system_fingerprint(model_id),
    }


@cache
def system_fingerprint(model_id: str) -> str:
    """Return a name for all that a seeded answer depends on: the model and the arithmetic."""
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    return f"fp_{sha256(' '.join([model_id, *versions]).encode()).hexdigest()[:12]}"
