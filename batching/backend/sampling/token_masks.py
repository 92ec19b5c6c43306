"""Masks of the tokens that constraints allow, filled while the model runs."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final

import mlx.core as mx
import numpy as np

from batching.backend.sampling.logit_rows import Sample
from batching.constraints.protocol import MaskRow, TokenMatcher
from batching.steps.sequences import SequenceState

# The eight bits of a byte, lowest first: 0 where set, else minus infinity.
_TERMS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)


class TokenMasks:
    """The masks of one step; `apply` waits for them.

    masks: int32 `[num_rows, ceil(vocab_size / 32)]`.
    """

    def __init__(self, rows: Sequence[int], masks: Future[MaskRow]) -> None:
        self._rows = rows
        self._masks = masks

    def apply(self, logits: mx.array) -> mx.array:
        """Return logits `[S, vocab_size]` with minus infinity where nothing may follow."""
        masks = self._masks.result().view(np.uint8)
        terms = mx.array(_TERMS)[mx.array(masks)].reshape(len(masks), -1)
        rows = mx.array(list(self._rows))
        logits[rows] = logits[rows] + terms[:, : logits.shape[-1]]
        return logits

    def wait(self) -> None:
        """Return when all masks are filled."""
        wait([self._masks])


class MaskFiller:
    """Fills the masks of a step in a thread of its own."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="token-masks")

    @contextmanager
    def filling(
        self, samples: Sequence[Sample], sequences: Mapping[int, SequenceState]
    ) -> Iterator[TokenMasks | None]:
        """Fill the masks of the constrained samples inside; None if there is none.

        At the end the thread is done with them, also if the model failed: a matcher must not be used
        by two threads at once.
        """
        masks = self.start(samples, sequences)
        try:
            yield masks
        finally:
            if masks is not None:
                masks.wait()

    def start(
        self, samples: Sequence[Sample], sequences: Mapping[int, SequenceState]
    ) -> TokenMasks | None:
        """Begin with the masks of the samples that need one now; None if there is none."""
        matchers = {
            row: matcher
            for row, sample in enumerate(samples)
            if (matcher := sequences[sample.sequence_id].matcher) is not None
            and not matcher.num_free
        }
        if not matchers:
            return None
        return TokenMasks(list(matchers), self._executor.submit(self._fill, matchers))

    def _fill(self, matchers: Mapping[int, TokenMatcher]) -> MaskRow:
        masks = np.zeros((len(matchers), self._num_words), np.int32)
        for row, matcher in zip(masks, matchers.values(), strict=True):
            _fill(matcher, row)
        return masks


def _fill(matcher: TokenMatcher, row: MaskRow) -> None:
    try:
        matcher.fill_mask(row)
    except BaseException as error:
        # A panic of Rust is no Exception: no handler would stop it in the waiting thread.
        raise RuntimeError("a constraint failed to fill its mask") from error
