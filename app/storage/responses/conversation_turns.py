"""Turns of responses that add to a conversation, one at a time.

They are in memory, as the responses are that have them: a server that crashes leaves none behind.
"""

from typing import Final


class ConversationBusy(Exception):
    """A response has its turn in this conversation."""


class ConversationTurn:
    """The right of one response to change the items of a conversation, until it is closed."""

    def __init__(self, turns: "ConversationTurns", owner: str, conversation_id: str) -> None:
        self._turns = turns
        self.owner: Final = owner
        self.conversation_id: Final = conversation_id

    def close(self) -> None:
        """End the turn if it has not ended."""
        self._turns.end(self)


class ConversationTurns:
    """Who has a turn; turns begin on the event loop, and may end in any thread."""

    def __init__(self) -> None:
        self._taken: Final[dict[tuple[str, str], ConversationTurn]] = {}

    def take(self, owner: str, conversation_id: str) -> ConversationTurn:
        """Begin a turn in a conversation, which need not exist.

        Raises:
            ConversationBusy: another one has not ended.
        """
        self.check_free(owner, conversation_id)
        turn = ConversationTurn(self, owner, conversation_id)
        self._taken[owner, conversation_id] = turn
        return turn

    def check_free(self, owner: str, conversation_id: str) -> None:
        """Raise ConversationBusy if a response has its turn."""
        if self.is_taken(owner, conversation_id):
            raise ConversationBusy

    def is_taken(self, owner: str, conversation_id: str) -> bool:
        """Return whether a response has its turn."""
        return (owner, conversation_id) in self._taken

    def end(self, turn: ConversationTurn) -> None:
        key = turn.owner, turn.conversation_id
        # Another one may have begun.
        if self._taken.get(key) is turn:
            del self._taken[key]
