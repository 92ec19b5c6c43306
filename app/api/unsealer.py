"""Unseals what one request holds."""

from app.storage.seal import MAX_CHARACTERS, SealedTooLong, Sealer
from batching import InvalidRequest


class Unsealer:
    """Unseals the values of one request for one purpose, up to a total number of characters."""

    def __init__(self, sealer: Sealer, purpose: str) -> None:
        self._sealer = sealer
        self._purpose = purpose
        self._num_left = MAX_CHARACTERS

    def unseal(self, sealed: str) -> str:
        """Return the text of a sealed value.

        Raises:
            ForgedValue: the value was not sealed by this server for this purpose.
            InvalidRequest: the texts of the request are too long together.
        """
        try:
            text = self._sealer.unseal(self._purpose, sealed, self._num_left)
        except SealedTooLong:
            message = f"its {self._purpose} is longer than {MAX_CHARACTERS} characters in all"
            raise InvalidRequest("messages", message) from None
        self._num_left -= len(text)
        return text
