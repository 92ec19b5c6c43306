"""Why a request is rejected before it is processed.

Rejection
├── Unauthorized        no valid key                           → 401
├── HostNotAllowed      the server is not known by this name   → 403
├── ForeignOrigin       a web page of another site sends it    → 403
├── Forbidden           the key does not allow it              → 403
├── NotFound            the client has no such object          → 404
├── BodyTooLarge        the body exceeds the size limit        → 413
├── FilesTooLarge       a file, or all together, exceed a limit → 413
├── BodyTooSlow         the body does not arrive in time       → 408
├── QuotaExceeded       the client reached its limit           → 429
├── QueueFull           the server reached its limit           → 503
├── ModelNotReady       the model is still being loaded        → 503
├── ShuttingDown        the server accepts no new requests     → 503
└── Unavailable         a failing probe, or a part of the server is missing → 503
"""

from typing import Final

# The limit in characters for text of the client that a message repeats.
_MAX_SHOWN: Final = 100


def _shown(text: str) -> str:
    return repr(text[:_MAX_SHOWN])


class Rejection(Exception):
    """A request that is not served; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unauthorized(Rejection):
    def __init__(self) -> None:
        super().__init__("a valid API key is required: send the header Authorization: Bearer <key>")


class HostNotAllowed(Rejection):
    def __init__(self, host: str) -> None:
        super().__init__(
            f"the server does not answer to the host name {_shown(host)}; "
            "if it should, add the name to MLX_SERVER_ALLOWED_HOSTS, or set API keys"
        )


class ForeignOrigin(Rejection):
    def __init__(self, origin: str) -> None:
        super().__init__(
            f"a web page of another site ({_shown(origin)}) may not send this request; "
            "if it may, add its origin to MLX_SERVER_CORS_ORIGINS, or set API keys"
        )


class Forbidden(Rejection):
    """The client is known, and may not do this."""


class NotFound(Rejection):
    """No object of the client has this id; that another client has it is not told apart."""


class BodyTooLarge(Rejection):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than the limit of {limit} bytes")


class FilesTooLarge(Rejection):
    """The message names the limit and its setting."""


class BodyTooSlow(Rejection):
    def __init__(self, seconds: float, bytes_per_second: float) -> None:
        super().__init__(
            f"the request body was not received within {seconds:g} seconds, "
            f"and one more for each {bytes_per_second:g} bytes of it"
        )


class QuotaExceeded(Rejection):
    def __init__(self, what: str, retry_after: int) -> None:
        super().__init__(f"{what}; please try again in {retry_after} s", retry_after=retry_after)


class QueueFull(Rejection):
    def __init__(self, what: str, retry_after: int) -> None:
        super().__init__(
            f"the server is busy: {what}; please try again in {retry_after} s",
            retry_after=retry_after,
        )


class ModelNotReady(Rejection):
    def __init__(self, model_id: str, retry_after: int) -> None:
        super().__init__(
            f"the model {_shown(model_id)} is not loaded yet, since other requests use the memory that it "
            f"needs, or its load takes long; please try again in {retry_after} s",
            retry_after=retry_after,
        )


class ShuttingDown(Rejection):
    def __init__(self, retry_after: int) -> None:
        super().__init__("the server is shutting down", retry_after=retry_after)


class Unavailable(Rejection):
    """The message of `/health` and `/ready` says why."""
