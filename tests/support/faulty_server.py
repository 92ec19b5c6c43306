"""`python -m tests.support.faulty_server`: the server, with faults that requests bring along.

A request's seed says what goes wrong, and at which of its tokens (or its `top_k`, where an API has no
seed): the model's forward pass raises
(as MLX does, or because numpy gets no memory), its logits for this request are no
numbers, the sampler raises for it, or the step does not end for a while.  The text of one token
cannot be decoded.  All else is as `python -m app` has it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from threading import Event
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401
from batching.backend.sampling.logit_rows import Sample
from batching.steps.sequences import SequenceState

# isort: split
import mlx.core as mx
import numpy as np

from app.cli import main
from batching.backend.builder import opening
from batching.backend.loader import LoadedModel, load_model
from batching.backend.paged.kv_cache import StepInputs
from batching.backend.platforms.cpu import sampling as native_sampling
from batching.backend.runner.mlx_runner import EncodingStep, MLXRunner, MLXStep
from batching.backend.sampling import slice_sampler
from batching.backend.sampling.expected_tokens import SampledTokens
from batching.backend.sampling.sampler import Masks, Sampler
from batching.steps.step_plan import StepPlan

# A token that cannot be decoded: a byte that no answer has.
POISON_TOKEN: Final = 7

# Seconds that a step takes which stalls.
STALL_TIME: Final = 4.0

# In bytes more than any address space holds.
_NO_SUCH_SHAPE: Final = (1 << 30, 1 << 20)
# Far from the seeds that other requests have.
_FIRST_SEED: Final = 7_000_000
_MAX_STEP: Final = 1000


class Fault(IntEnum):
    """What goes wrong; the first two fail the whole step, the last one only delays it."""

    FORWARD = 1
    MEMORY = 2
    NOT_A_NUMBER = 3
    SAMPLER = 4
    STALL = 5


def seed_for(fault: Fault, step: int) -> int:
    """Return the seed, or `top_k`, that brings a fault along, once so many tokens are out."""
    return _FIRST_SEED + fault * _MAX_STEP + step


def fault_of(sequence: SequenceState) -> Fault | None:
    """Return the fault that is due in this step."""
    number = max(sequence.sampling.seed or 0, sequence.sampling.top_k)
    kind, step = divmod(number - _FIRST_SEED, _MAX_STEP)
    num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
    is_due = kind in list(Fault) and num_output_tokens >= step
    return Fault(kind) if is_due else None


def _fail() -> None:
    raise RuntimeError("[malloc] injected")


def _allocate() -> None:
    np.zeros(_NO_SUCH_SHAPE, np.uint8)
    raise AssertionError("this machine has more memory than there is")


def _stall() -> None:
    Event().wait(STALL_TIME)


_STEP_FAULTS: Final[dict[Fault, Callable[[], None]]] = {
    Fault.FORWARD: _fail,
    Fault.MEMORY: _allocate,
    Fault.STALL: _stall,
}


class FaultyRunner(MLXRunner):
    """Fails in the middle of a step: the pool is written, no request has a token."""

    def submit(self, plan: StepPlan, after: MLXStep | None = None) -> MLXStep | EncodingStep:
        self._states = self._sequences.begin(plan)
        return super().submit(plan, after)

    def logits(self, step: StepInputs) -> mx.array:
        logits = super().logits(step)
        ids = [s.sequence_id for s in step.attention.slices]
        faults = {each: fault_of(self._states[each]) for each in ids}
        for fault in faults.values():
            if fault in _STEP_FAULTS:
                mx.eval(logits)
                _STEP_FAULTS[fault]()
        for sample, row in zip(step.logit_rows.samples, step.logit_rows.sample_rows, strict=True):
            if faults.get(sample.sequence_id) is Fault.NOT_A_NUMBER:
                logits[row] = mx.nan
        return logits


class FaultySampler(Sampler):
    def sample(
        self,
        logits: mx.array,
        samples: Sequence[Sample],
        sequences: Mapping[int, SequenceState],
        masks: Masks | None = None,
        expected: SampledTokens | None = None,
    ) -> tuple[mx.array, mx.array]:
        if any(fault_of(sequences[s.sequence_id]) is Fault.SAMPLER for s in samples):
            raise ValueError("injected")
        return super().sample(logits, samples, sequences, masks, expected)


def load_faulty_model(*args: Any, **kwargs: Any) -> LoadedModel:
    loaded = load_model(*args, **kwargs)
    decode = loaded.tokenizer.decode

    def decode_all_but_one(token_ids: Sequence[int], **options: Any) -> str:
        if POISON_TOKEN in token_ids:
            raise ValueError("injected")
        return str(decode(token_ids, **options))

    loaded.tokenizer.decode = decode_all_but_one
    return loaded


if __name__ == "__main__":
    opening.MLXRunner = FaultyRunner  # type: ignore[attr-defined]
    opening.load_model = load_faulty_model  # type: ignore[attr-defined]
    for module in (slice_sampler, native_sampling):
        module.Sampler = FaultySampler  # type: ignore[attr-defined]
    sys.exit(main())
