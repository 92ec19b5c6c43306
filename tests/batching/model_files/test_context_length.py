"""The context that a config declares."""

from typing import Any

import pytest

from batching.model_files.context_length import declared_context


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, 400),
        (
            {
                "max_position_embeddings": 400,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 100,
                },
            },
            400,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            131072,
        ),
        (
            {"model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": 131072},
            131072,
        ),
        ({}, None),
    ],
)
def test_the_context_is_what_the_config_declares(
    config: dict[str, Any], expected: int | None
) -> None:
    assert declared_context(config) == expected


@pytest.mark.parametrize("declared", [{}, {"max_position_embeddings": 131072}])
def test_the_context_of_gemma3_is_that_after_scaling(declared: dict[str, int]) -> None:
    part = declared | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert declared_context({"model_type": "gemma3_text", **part}) == 131072
    assert declared_context({"model_type": "gemma3", "text_config": part}) == 131072
