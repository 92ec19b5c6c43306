"""LiteLLM and LlamaIndex against a live server: `make test-clients`.

They need an older `openai` than the other tests, hence an environment of their own; the server
runs in the main one, whose interpreter `SERVER_PYTHON` names.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any, Final

import litellm  # type: ignore[import-not-found]
import pytest
from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found]
from llama_index.core.tools import FunctionTool  # type: ignore[import-not-found]
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

from scripts.server_process import ROOT, Server

MODEL: Final = "smollm2-135m-instruct"
QUESTION: Final = "What is the capital of France?"
ANSWER: Final = "The capital of France is Paris."
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=12)
    size: str = Field(pattern="^(small|large)$")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(python=os.environ["SERVER_PYTHON"]) as started:
        yield started
        assert started.stop() == 0


def complete(server: Server, question: str = QUESTION, **fields: Any) -> Any:
    """Ask by LiteLLM, which calls a server like ours `hosted_vllm` or `openai`."""
    return litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{server.url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        num_retries=0,
        timeout=120,
        **{"max_tokens": 40, **fields},
    )


def test_litellm_is_answered(server: Server) -> None:
    answer = complete(server)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_litellm_streams(server: Server) -> None:
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [8]


def test_litellm_calls_a_tool(server: Server) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    question = "How is the weather in Paris?"
    (choice,) = complete(server, question, **fields).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city"}
    streamed = litellm.stream_chunk_builder(list(complete(server, question, stream=True, **fields)))
    (same,) = streamed.choices[0].message.tool_calls
    assert same.function == call.function


def test_litellm_gets_json_of_a_schema(server: Server) -> None:
    schema = City.model_json_schema() | {"additionalProperties": False}
    form = {"name": "city", "schema": schema, "strict": True}
    answer = complete(
        server, "Describe Paris.", response_format={"type": "json_schema", "json_schema": form}
    )
    City.model_validate_json(answer.choices[0].message.content)
    answer = complete(server, "Describe Paris.", response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


def test_litellm_tells_what_is_rejected(server: Server) -> None:
    with pytest.raises(litellm.BadRequestError, match="max_tokens") as rejected:
        complete(server, max_tokens=0)
    assert rejected.value.status_code == 400


def test_litellm_tells_of_a_model_that_is_not_served(server: Server) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/nothing",
            api_base=f"{server.url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": QUESTION}],
            num_retries=0,
        )


@pytest.mark.parametrize("package", ["litellm", "llama_index"])
def test_the_recipe_runs_as_it_stands(
    server: Server, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (recipe,) = [example for example in examples if package in example]
    exec(recipe.replace("http://127.0.0.1:8000", server.url), {})
    assert capsys.readouterr().out.strip() == ANSWER


@pytest.fixture
def llm(server: Server) -> Any:
    """Return LlamaIndex's client of servers like OpenAI's."""
    return OpenAILike(
        model=MODEL,
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        temperature=0,
        max_tokens=40,
        max_retries=0,
        timeout=120,
    )


def test_llama_index_chats(llm: Any) -> None:
    answer = llm.chat([ChatMessage(role="user", content=QUESTION)])
    assert answer.message.content == ANSWER
    assert answer.message.role == "assistant"


def test_llama_index_streams_a_chat(llm: Any) -> None:
    parts = list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert "".join(part.delta or "" for part in parts) == ANSWER
    assert parts[-1].message.content == ANSWER


def test_llama_index_completes(llm: Any) -> None:
    assert llm.complete(QUESTION).text == ANSWER


def test_llama_index_calls_a_tool(llm: Any) -> None:
    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"It rains in {city}."

    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.predict_and_call([tool], "How is the weather in Paris?", tool_required=True)
    (output,) = answer.sources
    assert not output.is_error
    assert output.tool_name == "get_weather"
    assert output.content.startswith("It rains in ")


def test_llama_index_gets_its_type(llm: Any) -> None:
    structured = llm.as_structured_llm(City)
    answer = structured.chat([ChatMessage(role="user", content="Describe Paris.")])
    assert isinstance(answer.raw, City)
