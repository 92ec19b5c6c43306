"""What a request can get instead of tokens: one vector, pooled from the hidden states of its tokens."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

# 32-bit floats, unless said otherwise.
if TYPE_CHECKING:
    Vector = array[float]
else:
    Vector = array  # that takes no type before Python 3.12


class PoolingType(StrEnum):
    """Which hidden states become the vector: of the last token, of the first, or the mean of all."""

    LAST = "last"
    CLS = "cls"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the vector of one request is made.

    dimensions: how many numbers are kept, the first ones; None is all.
    normalize: whether the vector, of these numbers, gets length 1.
    """

    type: PoolingType = PoolingType.LAST
    dimensions: int | None = None
    normalize: bool = True

    def rows(self, start: int, stop: int, num_tokens: int) -> range:
        """Return the positions in `[start, stop)` of a request whose hidden states are needed."""
        if self.type is PoolingType.MEAN:
            return range(start, stop)
        position = 0 if self.type is PoolingType.CLS else num_tokens - 1
        return range(max(start, position), min(stop, position + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """A model that embeds, and how its authors describe that.

    size: the numbers of a whole vector.
    is_normalized: whether vectors have length 1, unless a request says otherwise.
    max_tokens: of one input; None is the model's context.
    prompts: texts that are put in front of an input, by name.
    default_prompt: the name of the one that is used unless a request names another.
    """

    pooling: PoolingType
    size: int
    is_normalized: bool = True
    max_tokens: int | None = None
    # Not hashed, since a mapping cannot be: models are keys of caches.
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class NoEmbeddings:
    """`reason` follows the model's name, for clients to read.

    is_described: False if nothing says how, so that the operator may.
    """

    reason: str
    is_described: bool = True


NO_EMBEDDINGS: Final = NoEmbeddings("is not described as an embedding model", is_described=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranker:
    """A model that says whether a document is relevant, by one token or another.

    template: its prompt as a chat template of the roles `query` and `document`, and `system` for an
        instruction; None is the model's own.
    """

    relevant_id: int
    irrelevant_id: int
    template: str | None = None
