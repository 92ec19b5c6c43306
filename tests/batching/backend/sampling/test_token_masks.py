"""Which rows get a mask."""

from collections.abc import Iterator

import pytest

from batching.backend.sampling.logit_rows import Sample
from batching.backend.sampling.token_masks import MaskFiller
from batching.constraints.protocol import AllowedTokens, Constraint
from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import StartedSequence
from tests.support.thinking import byte_budget


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    made = MaskFiller(256)
    yield made
    made._executor.shutdown()


def state(constraint: Constraint | None, output: bytes = b"") -> SequenceState:
    spec = SequenceSpec(prompt=(1,), max_tokens=9, constraint=constraint)
    return SequenceState(StartedSequence(0, spec, 1, tuple(output)))


@pytest.mark.parametrize(
    ("constraint", "output", "has_mask"),
    [
        (None, b"", False),
        (AllowedTokens([1]), b"", True),
        (byte_budget(1, begun=b"<t>"), b"", False),
        (byte_budget(1, begun=b"<t>"), b"a", True),
        (byte_budget(1, begun=b"<t>"), b"a</t>b", False),
        (byte_budget(9, begun=b"<t>", inner=AllowedTokens([1])), b"", True),
    ],
)
def test_only_rows_that_need_a_mask_now_have_one(
    filler: MaskFiller, constraint: Constraint | None, output: bytes, has_mask: bool
) -> None:
    masks = filler.start([Sample(0, 1 + len(output))], {0: state(constraint, output)})
    assert (masks is not None) is has_mask
    if masks is not None:
        masks.wait()
