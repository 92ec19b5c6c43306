"""The tokens of markers."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from app.parsing.grammars.tool_grammar import literal
from batching import ModelInfo, Tokenizer

# A marker, or a part of one, that may be a token of its own.
_MARKER: Final = re.compile(r"(<[^<>]+>|\[[^\[\]]+\]|◁[^◁▷]+▷)")


def token_of(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the one token of a text; None if it has several."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return token_ids[0] if len(token_ids) == 1 else None


def tokens_of(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Return the tokens of those texts that have one."""
    found = ((text, token_of(tokenizer, text)) for text in texts)
    return {text: token_id for text, token_id in found if token_id is not None}


def special_tokens(model: ModelInfo, texts: Iterable[str]) -> frozenset[int]:
    """Return the special tokens in the texts that a parser looks for."""
    encode = model.tokenizer.encode
    token_ids = {i for text in texts for i in encode(text, add_special_tokens=False)}
    return special_ids(model) & token_ids


@lru_cache(maxsize=8)
def special_ids(model: ModelInfo) -> frozenset[int]:
    """Return the tokens that are left out of the text unless it is asked for them.

    Hugging Face's list has only those that have a role, such as the end; gpt-oss's markers are
    not among them.
    """
    added: Any = getattr(model.tokenizer, "added_tokens_decoder", {})
    hidden = {token_id for token_id, token in added.items() if token.special}
    return frozenset(hidden.union(model.tokenizer.all_special_ids))


def symbols(tokenizer: Tokenizer, text: str) -> str:
    """Return a text of markers as lark has it: markers that are tokens by their numbers."""
    parts = filter(None, _MARKER.split(text))
    return " ".join(_symbol(tokenizer, part) for part in parts)


def _symbol(tokenizer: Tokenizer, text: str) -> str:
    token_id = token_of(tokenizer, text) if _MARKER.fullmatch(text) else None
    # llguidance takes such a token by its number only, not by its text.
    return literal(text) if token_id is None else f"<[{token_id}]>"
