"""What keeps the models of this machine from being found, fetched or deleted."""


class CommandError(Exception):
    """What was asked for cannot be done; its message is one line for the user."""
