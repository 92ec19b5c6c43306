"""Pooling: requests that get one vector, made from the hidden states of their tokens."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

# 32-bit floats, unless said otherwise.
if TYPE_CHECKING:
    Vector = array[float]
else:
    Vector = array  # it takes no type before Python 3.12


class PoolingType(StrEnum):
    """Which hidden states become the vector: of the last token, of the first, or the mean of all."""

    LAST = "last"
    CLS = "cls"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the vector of one request is made.

    type: which hidden states are pooled.
    dimensions: keep only the first of the vector's numbers; None keeps all.
    normalize: scale the vector, after that, to length 1.
    second: where the second text of a pair begins in the prompt, for a cross-encoder.
    """

    type: PoolingType = PoolingType.LAST
    dimensions: int | None = None
    normalize: bool = True
    second: int | None = None

    def rows(self, start: int, stop: int, num_tokens: int) -> range:
        """Return the positions in `[start, stop)` whose hidden states are pooled.

        num_tokens: the tokens of the whole request.
        """
        if self.type is PoolingType.MEAN:
            return range(start, stop)
        position = 0 if self.type is PoolingType.CLS else num_tokens - 1
        return range(max(start, position), min(stop, position + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """How a model makes embeddings, according to its files.

    size: the number of dimensions of a whole vector.
    is_normalized: vectors have length 1 unless a request says otherwise.
    max_tokens: the most tokens of one input; None is the model's context.
    prompts: texts to put before an input, by name.
    default_prompt: the name of the prompt that is used if a request names none.
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
    """A model that makes no embeddings.

    reason: why not, for the client; it follows the model's name in a sentence.
    is_described: False if nothing in the model's files says how; the operator may then set it.
    """

    reason: str
    is_described: bool = True


NO_EMBEDDINGS: Final = NoEmbeddings("is not described as an embedding model", is_described=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranker:
    """A model that scores a document by the probability of one token against another.

    template: its prompt as a chat template with the roles `query` and `document`, and `system` for an
        instruction; None is the model's own.
    """

    relevant_id: int
    irrelevant_id: int
    template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEncoder:
    """An encoder that reads a pair of texts and makes one number of it, the score.

    before, between, after: the tokens that it wants around the texts.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens there are beside those of the texts."""
        return len(self.before) + len(self.between) + len(self.after)
