"""What an encoder's tokenizer says: the longest text, and how it writes a pair of texts."""

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from batching.errors import ModelLoadError
from batching.pooling import CrossEncoder


def longest_text(tokenizer: TokenizerWrapper, context: int) -> int:
    """Return the most tokens of a text; tokenizers without a limit have a huge one."""
    limit = tokenizer._tokenizer.model_max_length
    return min(context, int(limit)) if limit > 0 else context


def cross_encoder_of(tokenizer: TokenizerWrapper) -> CrossEncoder:
    """Return the tokens that the tokenizer writes around two texts.

    Raises:
        ModelLoadError: it writes no pairs, or something within the texts.
    """
    backend: Any = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError("its tokenizer has no tokenizer.json, which tells how it writes pairs")
    pair = backend.encode("a", "a")
    places = pair.sequence_ids
    if 0 not in places or 1 not in places[places.index(0) :]:
        raise ModelLoadError("its tokenizer writes no pairs of texts")
    last = len(places) - 1
    first_ends = last - places[::-1].index(0) + 1
    second, second_ends = places.index(1), last - places[::-1].index(1) + 1
    return CrossEncoder(
        before=tuple(pair.ids[: places.index(0)]),
        between=tuple(pair.ids[first_ends:second]),
        after=tuple(pair.ids[second_ends:]),
    )
