"""Sampling as clients of llama.cpp ask for it: ranges, samplers and their order, what has no effect."""

from typing import Any

import pytest

from app.api.openai.chat.request import ChatCompletionRequest
from app.generation.job import build_job, sampling_params
from app.generation.params import DryPenalty, GenerationParams
from batching import DryParams, ModelInfo, SamplingParams
from tests.support.rows import rows
from tests.support.speaker import END, ByteTokenizer, served

LLAMA = [
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
]


def chat_request(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return ChatCompletionRequest.model_validate(body)


def sampling(request: ChatCompletionRequest) -> SamplingParams:
    model = ModelInfo("m", ByteTokenizer(), frozenset({END}), END + 1, 128)
    return sampling_params(model, request.to_generation_params())


async def rejection(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the error that a request with these fields gets."""
    body: dict[str, Any] = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    async with served() as server:
        response = await server.post(path, body | fields)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def asked(**fields: Any) -> GenerationParams:
    return chat_request(**fields).to_generation_params()


def test_all_that_is_said_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "typical_p": 0.5,
        "xtc_probability": 0.4,
        "xtc_threshold": 0.2,
        "temperature_last": True,
        "dynatemp_range": 0.7,
        "dynatemp_exponent": 2.0,
    }
    assert sampling(chat_request(**fields)) == SamplingParams(**fields)
    assert sampling(chat_request(typ_p=0.5)) == SamplingParams(typical_p=0.5)


# As a web page of llama.cpp and front ends of role play send them.
WITHOUT_EFFECT: dict[str, Any] = {
    "dynatemp_range": 0,
    "dynatemp_exponent": 1.0,
    "typ_p": 1,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "min_keep": 0,
    "tfs_z": 1.0,
    "temperature_last": False,
}


def test_defaults_of_other_servers_ask_for_nothing() -> None:
    assert sampling(chat_request(**WITHOUT_EFFECT)) == SamplingParams()
    written = chat_request(dry_sequence_breakers='["\\n", ":"]')
    assert written.dry_sequence_breakers == ["\n", ":"]


@rows(
    ("samplers", "order"),
    [
        (LLAMA, True),
        ([*LLAMA, "adaptive_p"], True),
        ("edskypmxt", True),
        ("edskypmxta", True),
        ("top_k;typ_p;top_p;min_p;temperature", True),
        (["top-k", "nucleus", "temp", "tfs_z"], True),
        (["temperature", "top_k", "top_p", "min_p"], False),
        # Both of these are off.
        (["xtc", "typical_p", "temperature", "top_p"], False),
        (["top_k"], False),
    ],
)
def test_the_order_of_samplers_says_where_the_temperature_is(samplers: Any, *, order: bool) -> None:
    fields: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
    assert asked(**fields, samplers=samplers).temperature_last is order
    assert asked(**fields, samplers=samplers, temperature_last=not order).temperature_last is order


def test_samplers_that_are_not_listed_are_off() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.3,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.2,
        "repetition_penalty": 1.2,
        "presence_penalty": 1.0,
        "xtc_probability": 0.5,
        "dry_multiplier": 1.0,
        "dynatemp_range": 0.2,
    }
    nothing = asked(**fields, samplers=[])
    assert nothing == asked(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    some = asked(**fields, samplers=["penalties", "top_k"])
    assert (some.top_k, some.top_p, some.temperature) == (5, 1.0, 1.0)
    assert (some.repetition_penalty, some.presence_penalty, some.dry) == (1.2, 1.0, None)


def test_a_penalty_of_no_token_is_none() -> None:
    params = asked(repeat_last_n=0, repeat_penalty=1.5, presence_penalty=1.0)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"typical_p": 1.1}, "typical_p", "less than or equal to 1"),
        ({"typ_p": 0.5, "typical_p": 0.6}, "typ_p", "typical_p says something else"),
        ({"xtc_probability": -0.1}, "xtc_probability", "greater than or equal to 0"),
        ({"xtc_threshold": float("nan")}, "xtc_threshold", "finite number"),
        ({"dynatemp_range": 1e300}, "dynatemp_range", "less than or equal to 10"),
        ({"dynatemp_exponent": "2"}, "dynatemp_exponent", "valid number"),
        ({"dry_multiplier": 1e300}, "dry_multiplier", "less than or equal to 100"),
        ({"dry_base": 0.5}, "dry_base", "greater than or equal to 1"),
        ({"dry_allowed_length": 65}, "dry_allowed_length", "less than or equal to 64"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n", "greater than or equal to -1"),
        ({"dry_sequence_breakers": ["x"] * 129}, "dry_sequence_breakers", "at most 128"),
        ({"dry_sequence_breakers": ["x"] * 10**6}, "dry_sequence_breakers", "at most 128"),
        ({"dry_sequence_breakers": "x" * 10**6}, "dry_sequence_breakers", "at most 128"),
        ({"dry_sequence_breakers": "[" * 5000}, "dry_sequence_breakers", "a list of texts"),
        ({"dry_sequence_breakers": ["x" * 65]}, "dry_sequence_breakers.0", "at most 64"),
        ({"dry_sequence_breakers": ["a", ""]}, "dry_sequence_breakers.1", "at least 1"),
        ({"samplers": ["top_k", "magic"]}, "samplers", "the samplers are penalties, dry,"),
        ({"samplers": ["x"] * 33}, "samplers", "at most 32"),
        ({"samplers": "x" * 10**6}, "samplers", "list"),
        (
            {"samplers": ["top_k", "temperature", "top_p"], "temperature": 0.5},
            "samplers",
            "the order must be penalties, dry, top_n_sigma, temperature, top_k",
        ),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n", "it must be -1"),
        ({"repeat_last_n": 64, "presence_penalty": 1}, "repeat_last_n", "it must be -1"),
        ({"mirostat": 2}, "mirostat", "not supported"),
        ({"min_keep": 5}, "min_keep", "not supported"),
        ({"adaptive_target": 0.5}, "adaptive_target", "not supported"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = await rejection(path, fields)
    assert error["param"] == param
    assert reason in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["typical_p", "xtc_probability", "dry_multiplier"])
async def test_beams_are_not_sampled(name: str) -> None:
    error = await rejection("/v1/completions", {"use_beam_search": True, "best_of": 2, name: 0.5})
    assert error["param"] == name


@pytest.mark.anyio
async def test_breakers_become_tokens() -> None:
    """Those of this tokenizer are bytes: a text of several is a sequence."""
    dry = DryPenalty(
        multiplier=0.8, base=1.5, allowed_length=3, last_n=50, breakers=["\n", "ab", "\n", "ab"]
    )
    params = asked(
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=3,
        dry_penalty_last_n=50,
        dry_sequence_breakers=["\n", "ab", "\n", "ab"],
    )
    assert params.dry == dry
    assert asked(dry_multiplier=0.8, dry_penalty_last_n=0).dry is None
    async with served() as server:
        job = build_job(server.engine, [[1]], params, completion_id="c", max_output_tokens=1000)
        plain = build_job(server.engine, [[1]], asked(), completion_id="c", max_output_tokens=1000)
        response = await server.chat(dry_multiplier=0.8, xtc_probability=0.5, typical_p=0.9)
    assert response.status_code == 200
    assert plain.spec.sampling.dry is None
    assert job.spec.sampling.dry == DryParams(
        multiplier=0.8,
        base=1.5,
        allowed_length=3,
        last_n=50,
        breakers=frozenset({10}),
        breaker_sequences=((97, 98),),
    )
