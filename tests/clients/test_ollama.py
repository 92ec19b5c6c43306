"""Programs that know only Ollama's API, against a live server: `make test-clients`."""

import json
import os
from collections.abc import Iterator
from typing import Any, Final

import litellm  # type: ignore[import-not-found]
import ollama  # type: ignore[import-not-found]
import pytest
from langchain_ollama import ChatOllama, OllamaLLM  # type: ignore[import-not-found]
from llama_index.llms.ollama import Ollama  # type: ignore[import-not-found]

from scripts.server_process import Server

MODEL: Final = "smollm2-135m-instruct"
QUESTION: Final = "What is the capital of France?"
ANSWER: Final = "The capital of France is Paris."
TURNS: Final = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(python=os.environ["SERVER_PYTHON"]) as started:
        yield started
        assert started.stop() == 0


@pytest.fixture
def client(server: Server) -> Any:
    return ollama.Client(host=server.url)


def test_ollama_chats(client: Any) -> None:
    answer = client.chat(f"{MODEL}:latest", TURNS, options={"temperature": 0})
    assert answer.message.content == ANSWER
    assert (answer.done_reason, answer.eval_count) == ("stop", 8)
    assert answer.total_duration >= answer.prompt_eval_duration > 0


def test_ollama_streams(client: Any) -> None:
    parts = client.generate(MODEL, QUESTION, stream=True)
    assert "".join(part.response for part in parts) == ANSWER


def test_ollama_gets_json_of_a_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}},
        "required": ["name"],
        "additionalProperties": False,
    }
    answer = client.chat(MODEL, TURNS, format=schema)
    assert json.loads(answer.message.content).keys() == {"name"}


def test_ollama_sees_the_models(client: Any) -> None:
    client.generate(MODEL)
    assert client.list().models[0].model == client.ps().models[0].model == MODEL
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    assert shown.modelinfo["llama.context_length"] > 0


def test_ollama_tells_what_is_rejected(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="think") as rejected:
        client.chat(MODEL, TURNS, think=True)
    assert rejected.value.status_code == 400


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_litellm_asks_ollama(server: Server, provider: str) -> None:
    fields = {"model": f"{provider}/{MODEL}", "api_base": server.url, "messages": TURNS}
    answer = litellm.completion(**fields, temperature=0, max_tokens=20)
    assert "Paris" in answer.choices[0].message.content
    parts = litellm.completion(**fields, temperature=0, max_tokens=20, stream=True)
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in parts)


def test_langchain_asks_ollama(server: Server) -> None:
    fields = {"model": MODEL, "base_url": server.url, "temperature": 0}
    assert ChatOllama(**fields, validate_model_on_init=True).invoke(QUESTION).content == ANSWER
    assert OllamaLLM(**fields).invoke(QUESTION) == ANSWER


def test_llama_index_asks_ollama(server: Server) -> None:
    llm = Ollama(model=MODEL, base_url=server.url, temperature=0, request_timeout=120)
    assert llm.complete(QUESTION).text == ANSWER
    assert "".join(part.delta for part in llm.stream_complete(QUESTION)) == ANSWER
