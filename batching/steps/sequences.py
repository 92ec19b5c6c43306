"""The sequences of an executor, which it knows from plans alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from batching.constraints.protocol import TokenMatcher
from batching.inputs.sampling_params import SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.step_plan import Slice, SliceOutput, StartedSequence, StepPlan


class SequenceState:
    """One sequence, as far as its tokens are known.

    token_ids: the prompt followed by the output.
    matcher: follows the spec's constraint; None without one.
    pooled: sums of the hidden states of a sequence with pooling, in the executor's own form.
    """

    def __init__(self, started: StartedSequence) -> None:
        self.sequence_id = started.sequence_id
        self.spec: SequenceSpec = started.spec
        self.seed = started.seed
        self.token_ids = [*started.spec.prompt]
        constraint = started.spec.constraint
        self.matcher: TokenMatcher | None = None if constraint is None else constraint.matcher()
        self.pooled: Any = None
        for token_id in started.output_token_ids:
            self.append(token_id)

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt)

    def append(self, token_id: int) -> None:
        """Append a token of the output."""
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)


class Sequences:
    """The sequences that have started and not ended, by their ids."""

    def __init__(self) -> None:
        self._states: dict[int, SequenceState] = {}

    def begin(self, plan: StepPlan) -> Mapping[int, SequenceState]:
        """Forget and start what a plan says; return the sequences of its slices, their forks included."""
        for sequence_id in plan.gone:
            self._states.pop(sequence_id, None)
        for started in plan.started:
            self._states[started.sequence_id] = SequenceState(started)
        ids = (each for s in plan.slices for each in (s.sequence_id, *s.forks))
        return {sequence_id: self._states[sequence_id] for sequence_id in ids}

    def forget(self) -> None:
        self._states.clear()


def recorded(s: Slice, sequences: Mapping[int, SequenceState], output: SliceOutput) -> SliceOutput:
    """Append the sampled tokens of a slice to its sequences; return its output with what follows of that."""
    if not s.num_samples:
        return output
    sequence = sequences[s.sequence_id]
    for token_id in accepted(s, output):
        sequence.append(token_id)
    if sequence.matcher is None and not s.forks:
        return output
    for fork, token_id in zip(s.forks, output.token_ids[s.num_samples :], strict=True):
        sequences[fork].append(token_id)
    ids = (s.sequence_id, *s.forks)
    matchers = [(each, m) for each in ids if (m := sequences[each].matcher) is not None]
    return output._replace(
        completed=tuple(each for each, m in matchers if m.is_complete),
        errors=tuple((each, error) for each, m in matchers if (error := m.error) is not None),
        num_free=tuple((each, m.num_free) for each, m in matchers),
    )


def accepted(s: Slice, output: SliceOutput) -> Sequence[int]:
    """Return the tokens sampled for a slice's sequence, up to and including the first that is not its draft."""
    sampled = output.token_ids[: s.num_samples]
    if not s.num_drafts:
        return sampled
    pairs = zip(sampled, (*s.drafts, None), strict=True)
    num_right = next(i for i, (token_id, draft) in enumerate(pairs) if token_id != draft)
    return sampled[: num_right + 1]
