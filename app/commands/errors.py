"""What keeps a command from its result."""


class CommandError(Exception):
    """A command cannot run; its message is one line for the user."""


class RequestFailed(Exception):
    """The server refused a request, or its answer is bad; the message is one line for the user."""
