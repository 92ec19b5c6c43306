"""How urgent a request is, and how long it may take."""

from typing import Final, Literal

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Timeout
from batching import Priority

_PRIORITIES: Final = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}

# OpenAI's field, for clients that cannot send ours; `ultrafast` is known to responses only.
SERVICE_TIERS: Final = {
    "priority": Priority.HIGH,
    "fast": Priority.HIGH,
    "ultrafast": Priority.HIGH,
    "auto": Priority.NORMAL,
    "default": Priority.NORMAL,
    "scale": Priority.NORMAL,
    "flex": Priority.LOW,
}


def served_tier(asked: str) -> str:
    """Return the `service_tier` of a response; `auto` is the one of a project's settings, of which there are none."""
    return "default" if asked == "auto" else asked


class QueueOptions(RequestModel):
    timeout: Timeout = None
    priority: Literal["high", "normal", "low"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] = "auto"

    @property
    def queue_priority(self) -> Priority:
        """Our own field if it is set, else the meaning of OpenAI's `service_tier`."""
        if self.priority is not None:
            return _PRIORITIES[self.priority]
        return SERVICE_TIERS[self.service_tier]
