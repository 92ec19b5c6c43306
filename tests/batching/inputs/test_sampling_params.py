"""What a request's sampling asks of the sampler."""

from typing import Any

import pytest

from batching.inputs.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({}, True),
        ({"top_k": 5}, True),
        ({"typical_p": 0.9}, False),
        ({"xtc_probability": 1}, False),
    ],
)
def test_plain_sampling_is_what_the_kernels_do(fields: dict[str, Any], is_plain: bool) -> None:
    params = SamplingParams(**fields)
    assert params.is_plain is is_plain
    assert not params.has_penalties
