"""The model runner: runs the scheduler's plans on an MLX model."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.adapters.model import ModelAdapters, are_adapted, mark_overflowing
from batching.backend.exceptions import forget_locals
from batching.backend.hooks.rows import RowSelection
from batching.backend.host_array import host_array
from batching.backend.paged.kv_cache import PagedKVCache, StepInputs
from batching.backend.platform import Graphs
from batching.backend.pooling.head import NO_HEAD, PoolingHead
from batching.backend.pooling.pooler import PooledRows
from batching.backend.runner.stored_blocks import StoredBlocks
from batching.backend.sampling.expected_tokens import SampledTokens
from batching.backend.sampling.sampler import Sampler
from batching.backend.sampling.slice_sampler import SliceSampler, not_finite, request_ids
from batching.backend.vision.images import Images, isolate_encoding
from batching.inputs.sampling_params import SamplingParams
from batching.ranks.lockstep.steps import Lockstep
from batching.steps.sequences import Sequences, SequenceState, recorded
from batching.steps.step_plan import Slice, SliceOutput, StepPlan


class MLXRunner:
    """Runs each step as one ragged forward pass: T tokens of any requests as T rows of length 1.

    A `PipelinedRunner`.  The model is unmodified code of mlx-lm; the cache objects that it gets write and
    read the paged pool.

    stored: saves and restores blocks; None without a store.
    lockstep: tells other ranks of each step; None if there are none, or another rank plans.
    """

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int,
        selection: RowSelection,
        cache: PagedKVCache,
        sampler: Sampler | None = None,
        head: PoolingHead = NO_HEAD,
        graphs: Graphs | None = None,
        images: Images | None = None,
        adapters: ModelAdapters | None = None,
    ) -> None:
        """Make the runner of a model that `check_model` has found to work on the pool.

        vocab_size: the width of the logits.
        selection: the hook that computes logits only for the rows that need them.
        cache: the KV pool; its `caches` are passed to the model.
        sampler: None samples on the device of the logits, or with numpy on a CPU.
        head: turns hidden states into embeddings.
        graphs: keeps the compute graphs of decode steps; None builds the graph of each step.
        images: places the rows of images; None if the model takes none.
        adapters: those of the requests; None if the model takes none.
        """
        self._model = model
        self._selection = selection
        self.cache = cache
        self._sampler = SliceSampler(vocab_size, sampler)
        self._head = head
        self._graphs = graphs
        self._images = images
        self._adapters = adapters
        self.stored: StoredBlocks | None = None
        self.lockstep: Lockstep | None = None
        self._sequences = Sequences()

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        return self.submit(plan).collect()

    @property
    def takes_queued_steps(self) -> bool:
        """True if a step may be submitted before the previous one is collected."""
        # Else what is returned for a step would be late by all of the next one.
        return self.cache.takes_queued_steps and not self._sampler.waits_for_logits

    def can_follow(self, sampling: SamplingParams) -> bool:
        return self._sampler.can_follow(sampling)

    def submit(self, plan: StepPlan, after: "MLXStep | None" = None) -> "MLXStep | EncodingStep":
        try:
            return self._submit(plan, after)
        except Exception as error:
            forget_locals(error)
            if self.lockstep is not None:
                self.lockstep.check(error)
            raise

    def follow(self, plan: StepPlan) -> None:
        """Compute a step with the rank that has planned it, which alone samples."""
        sequences = self._sequences.begin(plan)
        self._move_blocks(plan, None)
        if plan.slices:
            step = self.cache.begin(plan.slices, plan.gone)
            _evaluate(self._passed(step, PooledRows.of(step.attention.slices, sequences)))

    def logits(self, step: StepInputs) -> mx.array:
        """Return the logits of the rows that need them, `[L, vocab_size]`."""
        has_images = self._images is not None and self._images.are_placed
        is_unlike = has_images or self._selection.pooled_rows is not None
        if self._graphs is None or is_unlike or are_adapted(step.attention.slices):
            return self._built_logits(step)
        return self._graphs.logits(step, self._built_logits)

    def reset(self) -> None:
        self._selection.are_finite = self._selection.hidden = None
        self._sequences.forget()
        if self._images is not None:
            self._images.reset()
        if self._adapters is not None:
            self._adapters.reset()
        self.cache.reset()

    def _built_logits(self, step: StepInputs) -> mx.array:
        self._selection.rows = step.logit_rows.rows
        try:
            logits: mx.array = self._model(step.tokens, cache=self.cache.caches)
        finally:
            self._selection.rows = None
            if self._images is not None:
                self._images.leave()
        if len(logits) != len(step.logit_rows.rows):
            logits = logits[step.logit_rows.rows]
        return logits.squeeze(1)

    def _submit(self, plan: StepPlan, after: "MLXStep | None") -> "MLXStep | EncodingStep":
        expected = None if after is None else after.sampled
        sequences = self._sequences.begin(plan)
        if self.lockstep is not None:
            self.lockstep.begin(plan)
        self._move_blocks(plan, after)
        if self._adapters is not None:
            self._adapters.load(plan)
        images = self._images
        encoded = [] if images is None else images.begin(plan)
        if not plan.slices:
            if self.lockstep is not None:
                self.lockstep.computed()
            with isolate_encoding(plan.encodes, encoded):
                mx.async_eval(encoded)
            return EncodingStep(plan, encoded)
        step = self.cache.begin(plan.slices, plan.gone, images.positions if images else None)
        if expected is not None:
            expected.fill(step.tokens, step.attention.slices)
        if images is not None:
            images.place(step.attention.slices, sequences, step.tokens)
        pooled = PooledRows.of(step.attention.slices, sequences)
        with self._sampler.masks(step.logit_rows, sequences) as masks:
            passed = self._passed(step, pooled)
            if self.lockstep is not None:
                _evaluate(passed)
                self.lockstep.computed()
            logits, written = passed.logits, [*passed.written, *encoded]
            isolated = self._sampler.isolate_failures(
                step.attention.slices, sequences, logits, written, expected
            )
            with isolated, isolate_encoding(plan.encodes, encoded):
                sampled = self._sampler.sample(step.logit_rows, sequences, logits, masks, expected)
                mx.async_eval(sampled.tokens, sampled.logits, written)
        return MLXStep(
            self._sampler,
            self._head,
            plan,
            sequences,
            step,
            pooled,
            logits,
            sampled,
            written,
            encoded,
            passed.are_finite,
            passed.hidden,
        )

    def _passed(self, step: StepInputs, pooled: PooledRows) -> "_Pass":
        """Return the arrays of a forward pass, which are not evaluated yet."""
        with self._adapted(step):
            logits, hidden = self._logits_and_hidden(step, pooled)
        self.cache.flush()
        are_finite, self._selection.are_finite = self._selection.are_finite, None
        # The pool is evaluated in any case: lazy writes would pile up from step to step.
        written = self.cache.arrays
        written += [array for array in (are_finite, hidden) if array is not None]
        return _Pass(logits, written, are_finite, hidden)

    def _move_blocks(self, plan: StepPlan, after: "MLXStep | None") -> None:
        """Copy blocks and states, and exchange them with the store, before the step writes any."""
        if after is not None and (plan.copies or plan.restores):
            # They are made at once: the step in flight writes what is copied, or had the blocks that are restored.
            mx.eval(after.sampled.tokens, after.written)
        self.cache.copy_blocks(plan.copies)
        self.cache.copy_states(plan.state_copies)
        if self.stored is not None:
            self.stored.save(plan.saves)
            self.stored.restore(plan.restores)

    def _adapted(self, step: StepInputs) -> AbstractContextManager[None]:
        """Return the context in which the model adds adapters to the rows of a step."""
        if self._adapters is None:
            return nullcontext()
        return self._adapters.running(step.attention.slices)

    def _logits_and_hidden(
        self, step: StepInputs, pooled: PooledRows
    ) -> tuple[mx.array, mx.array | None]:
        """Return the logits of the selected rows, and the hidden states of those that are pooled."""
        self._selection.pooled_rows = pooled.rows
        try:
            logits = self.logits(step)
        finally:
            self._selection.pooled_rows = None
        hidden, self._selection.hidden = self._selection.hidden, None
        return logits, hidden


class _Pass(NamedTuple):
    """The arrays of a forward pass; see `MLXStep`."""

    logits: mx.array
    written: list[mx.array]
    are_finite: mx.array | None
    hidden: mx.array | None


def _evaluate(passed: _Pass) -> None:
    """Compute a forward pass; all ranks do it with the same call, so that their collectives have one order."""
    mx.eval(passed.logits, passed.written)


@dataclass
class EncodingStep:
    """A step without slices: pieces of images, which are being evaluated, or less; nothing is queued behind it."""

    plan: StepPlan
    encoded: list[mx.array]

    def collect(self) -> Sequence[SliceOutput]:
        try:
            with isolate_encoding(self.plan.encodes, self.encoded):
                mx.eval(self.encoded)
        except Exception as error:
            forget_locals(error)
            raise
        finally:
            self.encoded = []
        return []


@dataclass
class MLXStep:
    """A step whose arrays are being evaluated; it is collected once.

    logits: `[L, vocab_size]`, for the L rows of `inputs.logit_rows`.
    written: arrays of the pool and others that are evaluated together with the tokens.
    encoded: those of them that are of images.
    are_finite: bool `[T]`, whether each row is finite; None if the model does not say.
    hidden: `[P, hidden_size]`, the hidden states of the P rows that are pooled; None without any.
    """

    sampler: SliceSampler
    head: PoolingHead
    plan: StepPlan
    sequences: Mapping[int, SequenceState]
    inputs: StepInputs
    pooled: PooledRows
    logits: mx.array
    sampled: SampledTokens
    written: list[mx.array]
    encoded: list[mx.array]
    are_finite: mx.array | None
    hidden: mx.array | None

    def collect(self) -> Sequence[SliceOutput]:
        try:
            return self._collect()
        except Exception as error:
            mark_overflowing(error, self.sequences)
            forget_locals(error)
            raise
        finally:
            # An exception's frames may still have it while the pool is allocated again.
            vars(self).clear()

    def _collect(self) -> list[SliceOutput]:
        isolated = self.sampler.isolate_failures(
            self.slices, self.sequences, self.logits, self.written
        )
        with isolated, isolate_encoding(self.plan.encodes, self.encoded):
            mx.eval(self.sampled.tokens, self.sampled.logits, self.written)
            outputs = self.sampler.outputs(
                self.plan.slices,
                self.sequences,
                self.inputs.logit_rows,
                self.logits,
                self.sampled,
            )
        self._check_rows()
        pairs = list(zip(self.plan.slices, outputs, strict=True))
        if not self.pooled.slices:
            return [recorded(s, self.sequences, output) for s, output in pairs]
        vectors = dict(self.pooled.vectors(self.hidden, self.head))
        return [
            recorded(s, self.sequences, output)._replace(vector=vectors.get(s.sequence_id))
            for s, output in pairs
        ]

    @property
    def slices(self) -> Sequence[Slice]:
        """The slices in the order of the rows."""
        return self.inputs.attention.slices

    def _check_rows(self) -> None:
        """Raise SlicesFailed for requests with a row that is not finite, sampled or not.

        Such keys and values must not stay in the pool: an attention weight of 0 does not hide NaN from the
        request that gets the block next.
        """
        if self.are_finite is None:
            return
        are_finite = host_array(self.are_finite)
        if are_finite.all():
            return
        ends = np.cumsum([len(s) for s in self.slices])
        parts = zip(self.slices, np.split(are_finite, ends), strict=False)
        if failing := [s for s, part in parts if not part.all()]:
            raise not_finite(request_ids(failing))
