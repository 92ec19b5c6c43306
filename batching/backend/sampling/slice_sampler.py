"""From logits to the output of each slice, and to the requests at fault if that fails."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from batching.inputs.sampling_params import SamplingParams
from batching.steps.model_runner import SlicesFailed
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import Slice, SliceOutput


class SliceSampler:
    """Samples for all slices at once; one at a time only to find the ones that fail."""

    def __init__(self, vocab_size: int, sampler: Sampler | None = None) -> None:
        self._sampler = sampler or Sampler()
        self._mask_filler = MaskFiller(vocab_size)

    def masks(
        self, logit_rows: LogitRows, sequences: Mapping[int, SequenceState]
    ) -> AbstractContextManager[TokenMasks | None]:
        """Fill the masks of constraints while the model runs."""
        return self._mask_filler.filling(logit_rows.samples, sequences)

    @property
    def waits_for_logits(self) -> bool:
        return self._sampler.waits_for_logits

    def can_follow(self, sampling: SamplingParams) -> bool:
        """Return whether a token can be sampled before the one before it is known."""
        return sampling.logprobs is None and not sampling.bad_words and sampling.dry is None

    def sample(
        self,
        logit_rows: LogitRows,
        sequences: Mapping[int, SequenceState],
        logits: mx.array,
        masks: TokenMasks | None,
        expected: SampledTokens | None = None,
    ) -> SampledTokens:
        """Sample from logits `[L, vocab_size]`, lazily.

        sequences: those of the step, by their ids.
        expected: what the step in flight samples, if sequences expect tokens.
        """
        if not logit_rows.samples:
            return SampledTokens(mx.zeros(0, mx.uint32), mx.zeros(0), {})
        samples = logit_rows.samples
        has_logprobs = any(sequences[s.sequence_id].sampling.logprobs is not None for s in samples)
        if has_logprobs or logit_rows.scores:
            # Now, so that the arg-max reads them and does not compute the product again.
            mx.async_eval(logits)
        tokens, chosen = self._sampler.sample(
            logit_rows.sampled(logits), samples, sequences, masks, expected
        )
        index = {sample.sequence_id: i for i, sample in enumerate(samples)}
        return SampledTokens(tokens, chosen.astype(mx.float32), index)

    def outputs(
        self,
        slices: Sequence[Slice],
        sequences: Mapping[int, SequenceState],
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
            raise not_finite(sample.sequence_id for sample, is_finite in pairs if not is_finite)
        token_ids = host_array(sampled.tokens).tolist()
        return slice_outputs(slices, sequences, logit_rows, logits, token_ids)

    @contextmanager
    def isolate_failures(
        self,
        slices: Sequence[Slice],
        sequences: Mapping[int, SequenceState],
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
            if failed_ids := self._failing_ids(slices, sequences, logits, written, expected):
                raise SlicesFailed(failed_ids) from error
            raise

    def _failing_ids(
        self,
        slices: Sequence[Slice],
        sequences: Mapping[int, SequenceState],
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
            if not self._succeeds(s, sequences, w, logits[start : start + len(w.rows)], expected)
        )

    def _succeeds(
        self,
        s: Slice,
        sequences: Mapping[int, SequenceState],
        logit_rows: LogitRows,
        logits: mx.array,
        expected: SampledTokens | None,
    ) -> bool:
        try:
            with self.masks(logit_rows, sequences) as masks:
                sampled = self.sample(logit_rows, sequences, logits, masks, expected)
                self.outputs([s], sequences, logit_rows, logits, sampled)
        except Exception:
            return False
        return True


def request_ids(slices: Iterable[Slice]) -> set[int]:
    """Return the ids of the requests that slices belong to."""
    return {each for s in slices for each in (s.sequence_id, *s.forks)}


def not_finite(failed_ids: Iterable[int]) -> SlicesFailed:
    """Return the error for requests whose logits overflowed, or came from a damaged weight."""
    failure = SlicesFailed(failed_ids)
    failure.__cause__ = FloatingPointError("the model's logits are not finite")
    return failure
