"""Incremental detokenization."""

from collections.abc import Sequence
from typing import Final

from batching import Tokenizer

_REPLACEMENT: Final = "\ufffd"

# A character has at most four bytes and a token at least one, so five tokens that end in a
# replacement character contain bytes that no later token can complete.
_MAX_UNFINISHED: Final = 4


class Detokenizer:
    """Decodes a growing sequence so that the pieces join to the text of the whole.

    The whole ends before bytes that are no character yet.

    A token cannot be decoded alone: it may contain part of a character, and some tokenizers
    drop a leading space.  So a window is decoded: tokens whose text has been returned, as
    context, then the new ones.  Their text is that of the window without that of the context.
    While the window ends in a replacement character, its last character may be incomplete and
    nothing is returned.

    The DecodeStream of `tokenizers` does the same but raises on bytes that are not UTF-8, which
    a model may generate.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        # Looking a method up in mlx-lm's wrapper costs as much as calling it.
        self._decode_ids = tokenizer.decode
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context_tokens = 0
        # The text of these tokens, and that of the window.
        self._context = ""
        self._text = ""

    def add(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._has_no_text(token_id):
            # It would only make the window longer.
            return ""
        self._window.append(token_id)
        self._text = text
        if text.endswith(_REPLACEMENT):
            return self._release_broken_bytes(text)
        if text == self._context:
            return ""
        piece = text[len(self._context) :]
        self._start_window_at(self._num_context_tokens, len(self._window))
        return piece

    def add_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain, as `add` would, for the price of one."""
        if not token_ids:
            return ""
        text = self._decode([*self._window, *token_ids])
        if text == self._context or text.endswith(_REPLACEMENT):
            return "".join(map(self.add, token_ids))
        piece = text[len(self._context) :]
        self._window += token_ids
        self._start_window_at(self._num_context_tokens, len(self._window))
        return piece

    def flush(self) -> str:
        """Return the text held back; no more tokens follow.

        Unfinished bytes at its end are left out, and with them a replacement character that was
        generated as such: a tokenizer decodes both alike.
        """
        piece = self._decode(self._window)[len(self._context) :]
        self._start_window_at(len(self._window), len(self._window))
        return piece.rstrip(_REPLACEMENT)

    def _release_broken_bytes(self, text: str) -> str:
        """Return bytes that are certainly not a character, so that the window stays short.

        They are if the last token decodes to the same text alone: had it continued a character,
        the window would have one replacement character less.
        """
        last = len(self._window) - 1
        if last - self._num_context_tokens < _MAX_UNFINISHED:
            return ""
        before, after = self._decode(self._window[:last]), self._decode(self._window[last:])
        if before + after != text:
            return ""
        piece = before[len(self._context) :]
        self._start_window_at(last, last)
        self._text = after
        return piece

    def _start_window_at(self, start: int, num_done: int) -> None:
        """Drop the tokens before `start`; those in [start, num_done) become the context."""
        self._context = self._decode(self._window[start:num_done])
        del self._window[:start]
        self._num_context_tokens = num_done - start
        self._text = self._context

    def _has_no_text(self, token_id: int) -> bool:
        """True for a special token that is skipped, and for an id of no token.

        Others have none only at the start of a window, where a space is dropped.
        """
        return not self._decode([token_id, token_id])

    def _decode(self, token_ids: list[int]) -> str:
        return self._decode_ids(token_ids, skip_special_tokens=self._skip_special_tokens)
