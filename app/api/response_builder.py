"""What an endpoint says with a generation; how it says it over the wire is not its business."""

from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from time import time
from typing import Any, Final, Protocol
from uuid import uuid4

from pydantic import BaseModel

from app.api.openai.chat.response import PromptProgress
from app.api.openai.schemas.usage import Totals
from app.generation.choice import Delta
from app.generation.generation import Answer, Progress

# What decides the numbers, besides the model itself.
_PACKAGES: Final = ("mlx", "mlx-lm")


class ResponseBuilder(Protocol):
    """The words of one endpoint for one generation, streamed or whole."""

    def opening(self, num_choices: int) -> Iterable[BaseModel]: ...

    def progress(self, progress: Progress) -> BaseModel: ...

    def pieces(self, delta: Delta) -> Iterable[BaseModel]: ...

    def closing(self, totals: Totals) -> Iterable[BaseModel]: ...

    def whole(self, answers: Sequence[Answer], totals: Totals) -> BaseModel: ...


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


def prompt_progress(progress: Progress) -> PromptProgress:
    return PromptProgress(
        total=progress.num_prompt_tokens,
        cache=progress.num_cached_tokens,
        processed=progress.num_read_tokens,
        time_ms=round(progress.elapsed * 1000),
    )


@cache
def system_fingerprint(model_id: str) -> str:
    """Return a name for all that a seeded answer depends on: the model and the arithmetic."""
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    return f"fp_{sha256(' '.join([model_id, *versions]).encode()).hexdigest()[:12]}"
