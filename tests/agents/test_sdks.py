"""SDKs of npm, each in a script that prints what it got as JSON."""

from pathlib import Path

import pytest

from scripts.server_process import Server
from tests.agents.programs import MODEL, num_aborted, scripted_server, wait_for_abort
from tests.agents.sdks import run_script

pytestmark = pytest.mark.agents


def test_openai(tmp_path: Path, server: Server) -> None:
    before = num_aborted(server)
    found = run_script(tmp_path, server, "openai")
    assert found.pop("cached") >= 32
    assert found == {
        "chat": "Streamed.",
        "runTools": "The tool returned: It rains in Paris.",
        "call": ["weather", '{"city": "Rome"}'],
        "responses": "The tool returned: It snows.",
        "background": "Later.",
        "tooLong": [400, "context_length_exceeded"],
    }
    wait_for_abort(server, before)


def test_anthropic(tmp_path: Path, server: Server) -> None:
    before = num_aborted(server)
    found = run_script(tmp_path, server, "anthropic")
    assert found.pop("cached") >= 32
    assert found.pop("counted") == found.pop("prompt")
    status, kind, message = found.pop("tooLong")
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")
    assert found == {
        "call": ["weather", {"city": "Paris"}, "tool_use"],
        "text": "The tool returned: It rains.",
        "aborted": True,
    }
    wait_for_abort(server, before)


def test_ai_sdk(tmp_path: Path, server: Server) -> None:
    answer = [2, "The tool returned: It rains in Paris."]
    assert run_script(tmp_path, server, "ai") == {
        "responses": answer,
        "chat": answer,
        "messages": answer,
    }


def test_ollama(tmp_path: Path, server: Server) -> None:
    before = num_aborted(server)
    assert run_script(tmp_path, server, "ollama") == {
        "models": [MODEL],
        "capabilities": ["completion"],
        "generate": "Generated.",
        "chat": "Streamed.",
        "call": ["weather", {"city": "Rome"}],
        "none": 404,
        "aborted": "AbortError",
        "provider": [2, "The tool returned: It rains in Paris."],
    }
    wait_for_abort(server, before)


def test_an_editor_plug_in_fills_in(tmp_path: Path) -> None:
    with scripted_server("scripted_fill_in") as server:
        before = num_aborted(server)
        found = run_script(tmp_path, server, "continue")
        assert found == {"text": "return 3;", "aborted": True}
        wait_for_abort(server, before)
        assert server.stop() == 0
