"""All errors are in OpenAI's format, and short."""

from dataclasses import replace

import pytest

from app.http.errors.formats import openai_error
from app.http.errors.responses import ERROR_SPECS, error_report, error_spec
from batching import (
    EngineClosed,
    EngineConfig,
    EngineStopped,
    ModelLoadError,
    ModelNotFound,
    SchedulerManager,
)
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import EmptyPrompt
from tests.support.speaker import served

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}


async def test_an_unknown_path_is_a_404() -> None:
    async with served() as server:
        response = await server.client.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json() == {
        "error": {
            "message": "there is no /v1/nothing here",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_url",
        }
    }


async def test_a_wrong_method_is_a_405_that_names_the_right_one() -> None:
    async with served() as server:
        response = await server.client.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_supported"


async def test_a_body_without_its_content_type_is_a_400() -> None:
    async with served() as server:
        response = await server.client.post("/v1/completions", content=b'{"prompt": "Hi"}')
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


async def test_a_thousand_errors_make_a_short_response() -> None:
    messages = [{"role": "x" * 1000, "content": 7}] * 1000
    async with served() as server:
        response = await server.chat(messages=messages)
        other = await server.complete(logit_bias={"1" * 9: "x" * 10_000})
    assert response.status_code == other.status_code == 400
    assert max(len(response.content), len(other.content)) < 500


async def test_long_names_are_truncated_in_messages() -> None:
    async with served() as server:
        response = await server.chat(model="x" * 100_000)
    assert response.status_code == 404
    assert len(response.content) < 1000


async def test_a_model_that_does_not_load_is_a_500_without_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        raise ModelLoadError("/secret/model: no such file")

    async with served() as server:
        manager = SchedulerManager([EngineConfig(model="m", model_id="m")], build)
        server.app.state.service = replace(server.service, manager=manager)
        response = await server.chat(model="m")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the model cannot be loaded"
    assert "/secret/model: no such file" in caplog.text


def test_the_nearest_class_has_the_response() -> None:
    assert error_spec(EmptyPrompt()).status == 400
    assert error_spec(ModelNotFound("m")).status == 404
    assert error_spec(EngineStopped()).status == 503
    assert error_spec(EngineClosed()).code == "shutting_down"
    assert error_spec(KeyError()) is ERROR_SPECS[Exception]


def test_lone_surrogates_are_escaped() -> None:
    assert openai_error(error_report(ModelNotFound("\ud800"))).isascii()
