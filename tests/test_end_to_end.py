"""`python -m app` with the bundled model, over real sockets, as its users have it."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import httpx
import mlx.core as mx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from batching.backend import BLAS
from scripts.server_process import ROOT, Server
from tests.support.golden import GOLDEN, GoldenCase

pytestmark = pytest.mark.timeout(240)

MODEL = "smollm2-135m-instruct"
# The golden texts are greedy ones; the model's own defaults have a repetition penalty.
NO_PENALTY = {"repetition_penalty": 1}
SHORT = [case for case in GOLDEN if len(case.prompt_token_ids) < 200]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(cpu_precision="exact") as started:
        yield started
        assert started.stop() == 0


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def messages(case: GoldenCase) -> list[ChatCompletionMessageParam]:
    return cast(list[ChatCompletionMessageParam], case.messages)


def stream_text(client: openai.OpenAI, case: GoldenCase) -> tuple[str, str | None]:
    """Stream a golden case; return its text and finish reason."""
    text, reason = "", None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages(case),
        temperature=0,
        max_tokens=48,
        stream=True,
        extra_body=NO_PENALTY,
    )
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def test_the_start_says_what_was_chosen(server: Server) -> None:
    server.wait_for_line("^serving ")
    assert f"BLAS: {BLAS}" in server.log
    for word in ("device    cpu", "kernels   ", "1024 blocks", "MiB", "curl"):
        assert word in server.log


def python_examples(document: str) -> list[str]:
    """Return its examples, less those of clients that tests/clients runs."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [example for example in found if not re.search("litellm|llama_index", example)]


@pytest.mark.parametrize(
    "example", [*python_examples("README.md"), *python_examples("docs/clients.md")]
)
def test_the_documents_examples_run_as_they_stand(
    server: Server, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    assert "http://127.0.0.1:8000" in example
    exec(example.replace("http://127.0.0.1:8000", server.url), {})
    assert capsys.readouterr().out.strip()


def test_the_first_request_is_answered_right_by_default(bundled_server: Server) -> None:
    body = bundled_server.wait_for_line(r"curl .* -d '(.*)'")[1]
    assert "Can you tell me the capital of France?" in body
    bodies = [body, body.replace("Can you tell me the", "What is the")]
    url, headers = f"{bundled_server.url}/v1/chat/completions", {"Content-Type": "application/json"}
    responses = [httpx.post(url, content=each, headers=headers).json() for each in 3 * bodies]
    texts = {response["choices"][0]["message"]["content"] for response in responses}
    assert texts == {"The capital of France is Paris."}


def test_many_clients_at_once_get_the_golden_answers(server: Server) -> None:
    with client_of(server) as client, ThreadPoolExecutor(len(SHORT)) as pool:
        answers = pool.map(lambda case: stream_text(client, case), SHORT)
    assert list(answers) == [(case.text, case.finish_reason) for case in SHORT]


def test_a_whole_answer_reports_what_the_cache_gave(server: Server) -> None:
    with client_of(server) as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model=MODEL,
                messages=messages(SHORT[2]),
                temperature=0,
                max_tokens=48,
                extra_body=NO_PENALTY,
            )
    assert answer.choices[0].message.content == SHORT[2].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(SHORT[2].prompt_token_ids)
    assert answer.usage.prompt_tokens_details is not None
    # On a CPU all but the last token, otherwise full blocks.
    num_cached = len(SHORT[2].prompt_token_ids) - 1 if mx.default_device() == mx.cpu else 32
    assert answer.usage.prompt_tokens_details.cached_tokens == num_cached
