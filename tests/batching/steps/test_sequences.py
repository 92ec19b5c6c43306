"""What an executor knows of its sequences: from plans alone, until they end or all is forgotten."""

import pytest

from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.sequences import Sequences
from batching.steps.step_plan import Slice, StartedSequence, StepPlan
from tests.support.fakes import request


def slice_of(sequence_id: int) -> Slice:
    return request(sequence_id, 2, 1).make_slice(2)


def test_a_sequence_is_known_from_its_start_until_all_are_forgotten() -> None:
    sequences = Sequences()
    started = StartedSequence(7, SequenceSpec(prompt=(1, 2)), 0, (3,))
    plan = StepPlan((slice_of(7),), started=(started,))
    assert sequences.begin(plan)[7].token_ids == [1, 2, 3]
    later = StepPlan((slice_of(7),))
    assert sequences.begin(later)[7].token_ids == [1, 2, 3]
    sequences.forget()
    with pytest.raises(KeyError):
        sequences.begin(later)
