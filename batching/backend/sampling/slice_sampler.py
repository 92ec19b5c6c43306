"""From logits to the output of each slice, and to the requests at fault if that fails."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate

import mlx.core as mx
import numpy as np

from batching.backend.host_array import host_array
from batching.backend.sampling.expected_tokens import SampledTokens
from batching.backend.sampling.logit_rows import LogitRows
from batching.backend.sampling.sampler import Sampler
from batching.backend.sampling.slice_outputs import slice_outputs
from batching.backend.sampling.token_masks import MaskFiller, TokenMasks
from batching.request import BatchRequest
from batching.steps.model_runner import SlicesFailed
from batching.steps.step_plan import Slice, SliceOutput


class SliceSampler:
    """Samples for all slices at once; one at a time only to find the ones that fail."""

    def __init__(self, vocab_size: int, sampler: Sampler | None = None) -> None:
        self._sampler = sampler or Sampler()
        self._mask_filler = MaskFiller(vocab_size)

    def masks(self, logit_rows: LogitRows) -> AbstractContextManager[TokenMasks | None]:
        """Fill the masks of constraints while the model runs."""
        return self._mask_filler.filling(logit_rows.samples)

    @property
    def waits_for_logits(self) -> bool:
        return self._sampler.waits_for_logits

    def can_follow(self, request: BatchRequest) -> bool:
        """Return whether a token of a request can be sampled before the one before it is known."""
        return request.sampling.logprobs is None and not request.sampling.bad_words

    def sample(
        self,
        logit_rows: LogitRows,
        logits: mx.array,
        masks: TokenMasks | None,
        expected: SampledTokens | None = None,
    ) -> SampledTokens:
        """Sample from logits `[L, vocab_size]`, lazily.

        expected: what the step in flight samples, if requests expect tokens.
        """
        if not logit_rows.samples:
            return SampledTokens(mx.zeros(0, mx.uint32), mx.zeros(0), {})
        if logit_rows.needs_logprobs:
            # Now, so that the arg-max reads them and does not compute the product again.
            mx.async_eval(logits)
        samples = logit_rows.samples
        tokens, chosen = self._sampler.sample(logit_rows.sampled(logits), samples, masks, expected)
        index = {sample.request: i for i, sample in enumerate(samples)}
        return SampledTokens(tokens, chosen.astype(mx.float32), index)

    def outputs(
        self,
        slices: Sequence[Slice],
        logit_rows: LogitRows,
        logits: mx.array,
        sampled: SampledTokens,
    ) -> list[SliceOutput]:
        """Return an output for each slice.

        Raises:
            SlicesFailed: the model's logits are not finite.
        """
        if not all(flags := np.isfinite(host_array(sampled.logits)).tolist()):
            pairs = zip(logit_rows.samples, flags, strict=True)
            raise not_finite(
                sample.request.request_id for sample, is_finite in pairs if not is_finite
            )
        return slice_outputs(slices, logit_rows, logits, host_array(sampled.tokens).tolist())

    @contextmanager
    def isolate_failures(
        self,
        slices: Sequence[Slice],
        logits: mx.array,
        written: Sequence[mx.array],
        expected: SampledTokens | None = None,
    ) -> Iterator[None]:
        """Turn an error inside into SlicesFailed, if some slices raise it alone as well.

        slices: in the order of the rows of the logits `[L, vocab_size]`.
        written: what the forward pass writes; if that fails, no request can be singled out.
        expected: as for `sample`.
        """
        try:
            yield
        except SlicesFailed:
            raise
        except Exception as error:
            if failed_ids := self._failing_ids(slices, logits, written, expected):
                raise SlicesFailed(failed_ids) from error
            raise

    def _failing_ids(
        self,
        slices: Sequence[Slice],
        logits: mx.array,
        written: Sequence[mx.array],
        expected: SampledTokens | None,
    ) -> set[int]:
        try:
            mx.eval(logits, written)
        except Exception:
            return set()
        logit_rows = [LogitRows.of([s]) for s in slices]
        starts = accumulate((len(w.rows) for w in logit_rows), initial=0)
        return request_ids(
            s
            for s, w, start in zip(slices, logit_rows, starts, strict=False)
            if not self._succeeds(s, w, logits[start : start + len(w.rows)], expected)
        )

    def _succeeds(
        self, s: Slice, logit_rows: LogitRows, logits: mx.array, expected: SampledTokens | None
    ) -> bool:
        try:
            with self.masks(logit_rows) as masks:
                sampled = self.sample(logit_rows, logits, masks, expected)
                self.outputs([s], logit_rows, logits, sampled)
        except Exception:
            return False
        return True


def request_ids(slices: Iterable[Slice]) -> set[int]:
    """Return the ids of the requests that slices belong to."""
    return {request.request_id for s in slices for request in (s.request, *s.forks)}


def not_finite(failed_ids: Iterable[int]) -> SlicesFailed:
    """Return the error for requests whose logits overflowed, or came from a damaged weight."""
    failure = SlicesFailed(failed_ids)
    failure.__cause__ = FloatingPointError("the model's logits are not finite")
    return failure
