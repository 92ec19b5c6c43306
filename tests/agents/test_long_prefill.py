"""A prefill of more than a minute, and clients that give up on a silence of `IDLE_TIMEOUT` seconds.

All start together and share the minute.  Each has the timeout in its own way:

- Codex: `stream_idle_timeout_ms`, between events; comments do not count.
- Claude Code: `CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS`, between bytes; and `CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS`
  for headers.  `CLAUDE_STREAM_IDLE_TIMEOUT_MS` is 5 minutes or more.
- opencode: `chunkTimeout`, between bytes; and `headerTimeout` for headers.
- aider: `--timeout`; the SDKs of Python: `timeout`, between bytes.
- SDKs of npm: none of their own; Node's fetch has one between bytes, which its dispatcher sets.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import anthropic
import openai
import pytest

from scripts.server_process import Server
from tests.agents import aider, claude_code, codex, opencode, sdks
from tests.agents.programs import IDLE_TIMEOUT, MODEL

pytestmark = pytest.mark.agents
ANSWER: Final = "At last."
PROMPT: Final = f"[[slow {ANSWER}]]"

Run = Callable[[Path, Server], str]


def run_codex(home: Path, server: Server) -> str:
    run = codex.prepared(home, server).run([*codex.EXEC, "-"], PROMPT)
    assert run.returncode == 0, run.stdout
    return codex.last_message(run.stdout)


def run_claude_code(home: Path, server: Server) -> str:
    run = claude_code.prepared(home, server).run(claude_code.RUN, PROMPT)
    return str(claude_code.result(run.stdout)["result"])


def run_opencode(home: Path, server: Server) -> str:
    run = opencode.prepared(home, server).run(opencode.RUN, PROMPT)
    assert run.returncode == 0, run.stdout + run.stderr
    return opencode.texts(run.stdout)[-1]


def run_aider(home: Path, server: Server) -> str:
    place = aider.prepared(home, server)
    run = place.run(aider.command("--message", PROMPT))
    return ANSWER if ANSWER in run.stdout else run.stdout


def run_npm(home: Path, server: Server) -> str:
    found = sdks.run_script(home, server, "slow")
    return ANSWER if set(found.values()) == {ANSWER} else str(found)


def run_python_openai(_: Path, server: Server) -> str:
    with (
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=IDLE_TIMEOUT
        ) as client,
        client.responses.stream(model=MODEL, input=PROMPT) as stream,
    ):
        return stream.get_final_response().output_text


def run_python_anthropic(_: Path, server: Server) -> str:
    message: anthropic.types.MessageParam = {"role": "user", "content": PROMPT}
    with (
        anthropic.Anthropic(
            base_url=server.url, api_key="none", max_retries=0, timeout=IDLE_TIMEOUT
        ) as client,
        client.messages.stream(model=MODEL, max_tokens=100, messages=[message]) as stream,
    ):
        return stream.get_final_text()


RUNS: Final[Mapping[str, Run]] = {
    "codex": run_codex,
    "claude_code": run_claude_code,
    "opencode": run_opencode,
    "aider": run_aider,
    "npm": run_npm,
    "python_openai": run_python_openai,
    "python_anthropic": run_python_anthropic,
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, server: Server
) -> Iterator[Mapping[str, Future[str]]]:
    """Start all clients at once."""
    with ThreadPoolExecutor(len(RUNS)) as pool:
        yield {
            name: pool.submit(run, tmp_path_factory.mktemp(name), server)
            for name, run in RUNS.items()
        }


@pytest.mark.parametrize("client", RUNS)
def test_a_prefill_of_a_minute_is_no_silence(client: str, runs: Mapping[str, Future[str]]) -> None:
    assert runs[client].result() == ANSWER
