"""Unseals what one request holds."""

from app.storage.seal import MAX_CHARACTERS, SealedTooLong, Sealer
from batching import InvalidRequest


class Unsealer:
    """Unseals values of one purpose, up to a limit of characters in all."""

    def __init__(self, sealer: Sealer, purpose: str) -> None:
        self._sealer = sealer
        self._purpose = purpose
        self._num_left = MAX_CHARACTERS

    def unseal(self, sealed: str) -> str:
        """Return the text.

        Raises:
            ForgedValue: the value was not sealed here for this purpose.
            InvalidRequest: with the texts before it, it is too long.
        """
        try:
            text = self._sealer.unseal(self._purpose, sealed, self._num_left)
        except SealedTooLong:
            message = f"its {self._purpose} is longer than {MAX_CHARACTERS} characters in all"
            raise InvalidRequest("messages", message) from None
        self._num_left -= len(text)
        return text
