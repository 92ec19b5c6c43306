"""Rotations as transformers 5 writes them."""

from typing import Any

import pytest

from batching.backend.rotation import rotation_of

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("config", "lacks"),
    [
        ({}, {}),
        ({"rope_theta": 1.0}, {}),
        ({"rope_parameters": None}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"rope_theta": 500.0}),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 500.0}}, {}),
        (
            {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5.0, "partial_rotary_factor": 0.5},
        ),
        ({"rope_parameters": YARN}, {"rope_theta": 500.0, "rope_scaling": YARN}),
        ({"rope_parameters": YARN, "rope_scaling": {"factor": 2.0}}, {"rope_theta": 500.0}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, {}),
    ],
)
def test_what_a_config_lacks_is_found(config: dict[str, Any], lacks: dict[str, Any]) -> None:
    assert rotation_of(config) == lacks
