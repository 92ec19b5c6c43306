"""What keeps a command from its result."""

from app.store.errors import CommandError

__all__ = ["CommandError", "RequestFailed"]


class RequestFailed(Exception):
    """The server refused a request, or its answer is bad; the message is one line for the user."""
