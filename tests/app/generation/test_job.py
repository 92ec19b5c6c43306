"""A job is what a request asks for, completed by the model's defaults."""

from dataclasses import replace

import pytest

from app.generation.job import GenerationParams, sampling_params
from batching import ModelInfo, SamplingDefaults, SamplingParams
from tests.support.speaker import END, ByteTokenizer

SILENT = ModelInfo("m", ByteTokenizer(), frozenset({END}), END + 1, 128)
MODEL = replace(
    SILENT,
    sampling_defaults=SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1
    ),
)


def test_what_a_request_leaves_out_is_the_models_default() -> None:
    assert sampling_params(MODEL, GenerationParams()) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1
    )
    assert sampling_params(SILENT, GenerationParams()) == SamplingParams()


@pytest.mark.parametrize("top_k", [-1, 0])
def test_what_a_request_sets_is_not_overridden(top_k: int) -> None:
    params = GenerationParams(
        temperature=0.0, top_p=1.0, top_k=top_k, min_p=0.0, repetition_penalty=1.0
    )
    assert sampling_params(MODEL, params) == SamplingParams(temperature=0.0)
