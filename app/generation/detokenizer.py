"""Tokens to text, piece by piece."""

from typing import Final

from batching import Tokenizer

_REPLACEMENT: Final = "\ufffd"

# A character has at most four bytes and a token at least one, so five tokens that end in a
# replacement character contain bytes that no later token can mend.
_MAX_UNFINISHED: Final = 4


class Detokenizer:
    """Decodes a growing sequence so that the pieces join to the text of the whole.

    One token cannot be decoded by itself: it may hold part of a character, and some
    tokenizers drop a leading space.  So a window is decoded: tokens whose text is out
    already, as context, then the new ones.  Their text is what the window has beyond the
    context.  While the window ends in a replacement character, the last character may be
    unfinished and nothing comes out.

    tokenizers' own DecodeStream does the same but raises on bytes that are no UTF-8, which
    a model may well produce.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context_tokens = 0
        self._context = ""

    def add(self, token_id: int) -> str:
        """Take a token; return the text that is certain now."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._release_broken_bytes(text)
        if text == self._context:
            if self._is_special(token_id):
                # It would be no context either, only make the window longer.
                self._window.pop()
            return ""
        piece = text[len(self._context) :]
        self._start_window_at(self._num_context_tokens, len(self._window))
        return piece

    def flush(self) -> str:
        """Return what was held back; no more tokens will come."""
        piece = self._decode(self._window)[len(self._context) :]
        self._start_window_at(len(self._window), len(self._window))
        return piece

    def _release_broken_bytes(self, text: str) -> str:
        """Let go of bytes that are certain to be no character, so that the window stays short.

        They are, if the last token's text is the same by itself: had it continued a character,
        the window would have one replacement character less.
        """
        last = len(self._window) - 1
        if last - self._num_context_tokens < _MAX_UNFINISHED:
            return ""
        before, after = self._decode(self._window[:last]), self._decode(self._window[last:])
        if not after or before + after != text:
            return ""
        piece = before[len(self._context) :]
        self._start_window_at(last, last)
        return piece

    def _start_window_at(self, start: int, num_done: int) -> None:
        """Forget the tokens before `start`; those in [start, num_done) become the context."""
        self._context = self._decode(self._window[start:num_done])
        del self._window[:start]
        self._num_context_tokens = num_done - start

    def _is_special(self, token_id: int) -> bool:
        """True if it is left out; a token may also have no text at the start of a window only."""
        return self._tokenizer.decode([token_id]) != self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
