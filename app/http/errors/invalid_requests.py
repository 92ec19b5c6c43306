"""Errors of values of a request that clients know by their codes.

InvalidRequest
├── PreviousResponseNotFound   no stored response of the client   → 400
├── InvalidEncryptedContent    not sealed by this server          → 400
├── ConversationNotFound       no conversation of the client      → 404
├── ConversationLocked         a response is adding to it         → 400
├── ItemNotFound               no stored item of the client       → 404
└── InvalidImage               an image that cannot be used       → 400

A client that knows the code of a reference sends the conversation without the reference.
"""

from typing import Final

from batching import InvalidRequest

# The limit in characters of an id that a message repeats.
_MAX_ID: Final = 256


class PreviousResponseNotFound(InvalidRequest):
    def __init__(self, response_id: str) -> None:
        message = f"Previous response with id '{response_id[:_MAX_ID]}' not found."
        super().__init__("previous_response_id", message)


class InvalidEncryptedContent(InvalidRequest):
    def __init__(self, param: str) -> None:
        super().__init__(param, "this server has not made this value")


class InvalidImage(InvalidRequest):
    """Its message names the limit, and the setting if there is one."""


class ConversationNotFound(InvalidRequest):
    def __init__(self, conversation_id: str, param: str = "conversation") -> None:
        message = f"Conversation with id '{conversation_id[:_MAX_ID]}' not found."
        super().__init__(param, message)


class ConversationLocked(InvalidRequest):
    def __init__(self, param: str = "conversation") -> None:
        message = "a response is adding to this conversation; try again when it has ended"
        super().__init__(param, message)


class ItemNotFound(InvalidRequest):
    def __init__(self, item_id: str, param: str = "input") -> None:
        super().__init__(param, f"Item with id '{item_id[:_MAX_ID]}' not found.")
