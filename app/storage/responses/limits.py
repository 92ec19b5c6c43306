"""How much is stored for each client."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How many responses and bytes are kept for each owner, and for how many seconds; as many conversations, too."""

    max_responses: int = 1000
    max_age: float = 30 * 86_400.0
    max_bytes: int = 1 << 28
