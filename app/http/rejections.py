"""Why a request is turned away at the door, before anybody looks into it.

Refusal
├── Unauthorized        no key, or none that is known          → 401
├── BodyTooLarge        more bytes than the server takes       → 413
├── BodyTooSlow         the body does not come                 → 408
├── QuotaExceeded       this client has enough in hand         → 429
├── QueueFull           the server has enough in hand          → 503
├── ShuttingDown        the server takes nothing new           → 503
└── Unavailable         what a probe is told                   → 503
"""


class Rejection(Exception):
    """A request that is not served now; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unauthorized(Rejection):
    def __init__(self) -> None:
        super().__init__(
            "a key of this server is needed: send the header Authorization: Bearer <key>"
        )


class BodyTooLarge(Rejection):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes, the most that is taken")


class BodyTooSlow(Rejection):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request body has not come within {seconds:g} seconds")


class QuotaExceeded(Rejection):
    def __init__(self, what: str, retry_after: int) -> None:
        super().__init__(f"{what}; please try again in {retry_after} s", retry_after=retry_after)


class QueueFull(Rejection):
    def __init__(self, what: str, retry_after: int) -> None:
        super().__init__(
            f"the server is busy: {what}; please try again in {retry_after} s",
            retry_after=retry_after,
        )


class ShuttingDown(Rejection):
    def __init__(self, retry_after: int) -> None:
        super().__init__("the server is shutting down", retry_after=retry_after)


class Unavailable(Rejection):
    """`/health` and `/ready` say why."""
