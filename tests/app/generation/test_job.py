"""A job is what a request asks for, completed by the model's defaults."""

from dataclasses import replace

import pytest

from app.generation import job as job_module
from app.generation.job import GenerationJob, build_job, sampling_params
from app.generation.params import GenerationParams
from batching import InvalidRequest, ModelInfo, SamplingDefaults, SamplingParams
from tests.support.rows import rows
from tests.support.speaker import END, MODEL_ID, ByteTokenizer, speaking_manager

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


@rows(
    ("asked", "num_choices", "limit", "expected"),
    [
        (10, 1, 10_000, 10),
        # 64 blocks of 32 tokens, and prompts of 48 and fewer.
        (32_000, 1, 10_000, 2000),
        (32_000, 3, 600, 100),
        (None, 1, 10_000, None),
    ],
)
def test_max_tokens_are_clamped_to_context_and_server(
    asked: int | None, num_choices: int, limit: int, expected: int | None
) -> None:
    """The context is that of the longest prompt."""
    manager = speaking_manager()
    try:
        job = build_job(
            manager.get(MODEL_ID),
            [[1] * 8, [1] * 48],
            GenerationParams(max_tokens=asked, clamp_max_tokens=True, num_choices=num_choices),
            completion_id="c",
            max_output_tokens=limit,
        )
    finally:
        manager.close()
    assert job.spec.max_tokens == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (GenerationParams(), None),
        (GenerationParams(logprobs=0), None),
        # Less than the context: 2,048 tokens and a token of prompt.
        (GenerationParams(logprobs=3), 1024),
        (GenerationParams(logprobs=3, num_choices=4), 256),
        (GenerationParams(logprobs=1, logprob_token_ids=[1, 2, 2, 3]), 1024),
        (GenerationParams(logprobs=3, max_tokens=1024), 1024),
        (GenerationParams(logprobs=3, max_tokens=2000, clamp_max_tokens=True), 1024),
    ],
)
def test_log_probabilities_of_outputs_bound_their_tokens(
    monkeypatch: pytest.MonkeyPatch, params: GenerationParams, expected: int | None
) -> None:
    """Where the request does not say how many tokens it wants, it gets fewer."""
    monkeypatch.setattr(job_module, "MAX_LOGPROBS", 4096)
    assert built(params).spec.max_tokens == expected


def test_more_log_probabilities_than_that_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "MAX_LOGPROBS", 4096)
    with pytest.raises(InvalidRequest) as caught:
        built(GenerationParams(logprobs=3, max_tokens=1025))
    assert caught.value.param == "max_tokens"
    assert str(caught.value) == (
        "1 choices of 1025 tokens, each with 4 log probabilities, are more than the 1024 "
        "that one request may ask for"
    )


def built(params: GenerationParams) -> GenerationJob:
    manager = speaking_manager()
    try:
        return build_job(
            manager.get(MODEL_ID), [[1]], params, completion_id="c", max_output_tokens=4096
        )
    finally:
        manager.close()
