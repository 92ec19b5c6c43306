"""`launch` starts a program with variables and arguments that lead it to the server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from app.commands import launch
from app.commands.errors import CommandError
from tests.support.commands import run_command
from tests.support.rows import rows
from tests.support.talking_server import TalkingServer

ROOT: Final = Path(__file__).parents[3]
KEY: Final = "sk-secret"
# Prints what it was started with.
STAND_IN: Final = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
MODEL: Final = {"id": "org/qwen", "max_model_len": 40_960}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that is the only one with programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(programs: Path, name: str) -> None:
    (programs / name).write_text(STAND_IN)
    (programs / name).chmod(0o755)


def launched(server: TalkingServer, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Run `launch` in a process that becomes the program; return what that was started with."""
    code = (
        "import sys\nfrom app.commands import launch\nfrom tests.support.commands import run_command\n"
        "sys.exit(run_command(launch, *sys.argv[1:]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--url", server.url],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: tuple[list[str], dict[str, str]] = json.loads(run.stdout)
    return found


def printed(
    server: TalkingServer, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    server.models = {"data": [MODEL]}
    assert run_command(launch, *arguments, "--url", server.url, "--print", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_process_becomes_the_program(
    server: TalkingServer, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "claude")
    server.models = {"data": [MODEL]}
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-anthropic")
    monkeypatch.setenv("MLX_SERVER_API_KEY", KEY)
    arguments, variables = launched(server, "claude", "--model", "org/qwen")
    assert arguments == []
    assert "ANTHROPIC_API_KEY" not in variables
    assert variables["ANTHROPIC_BASE_URL"] == server.url
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40960"
    assert {v for name, v in variables.items() if name.endswith("_MODEL")} == {"org/qwen"}
    assert server.keys == [f"Bearer {KEY}"]


def test_arguments_and_variables_reach_execve(
    server: TalkingServer,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.extend(arguments))
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    install(programs, "claude")
    server.models = {"data": [{"id": "toy", "max_model_len": 8192}]}
    assert run_command(launch, "--url", server.url, "claude", "--", "-p", "--model", "x") == 0
    path, command, variables = started
    assert path == str(programs / "claude")
    assert command == ["claude", "-p", "--model", "x"]
    assert "CLAUDE_CODE_USE_BEDROCK" not in variables
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert capsys.readouterr().err == (
        "warning: claude needs a context of 32,000 tokens; toy has 8,192\n"
    )


def test_a_model_that_is_not_loaded_has_no_known_context(
    server: TalkingServer, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.extend(arguments))
    for name in ("claude", "codex", "opencode"):
        install(programs, name)
        assert run_command(launch, name, "--url", server.url) == 0
    _, _, claude, _, codex, _, _, _, opencode = started
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in claude
    assert not [value for value in codex if "model_context_window" in value]
    config = json.loads(opencode["OPENCODE_CONFIG_CONTENT"])
    (provider,) = config["provider"].values()
    assert provider["models"]["toy"]["limit"] == {"context": 32_768, "output": 4096}


def test_codex_takes_its_configuration_as_arguments(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{server.url}/v1"
    found = printed(server, capsys, "codex", "--api-key", KEY)
    name, *arguments = found["command"]
    assert name == "codex"
    assert arguments[::2] == ["-c"] * 8
    assert arguments[1::2] == [
        'model="org/qwen"',
        'model_provider="mlx-batch-server"',
        'model_providers.mlx-batch-server.name="mlx-batch-server"',
        f'model_providers.mlx-batch-server.base_url="{url}"',
        'model_providers.mlx-batch-server.wire_api="responses"',
        "features.view_image=false",
        "model_context_window=40960",
        'model_providers.mlx-batch-server.env_key="MLX_SERVER_API_KEY"',
    ]
    assert found["env"] == {"MLX_SERVER_API_KEY": "$MLX_SERVER_API_KEY"}


def test_opencode_takes_its_configuration_as_a_variable(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(server, capsys, "opencode", "--api-key", KEY)
    assert found["env"]["MLX_SERVER_API_KEY"] == "$MLX_SERVER_API_KEY"
    assert json.loads(found["env"]["OPENCODE_CONFIG_CONTENT"]) == {
        "provider": {
            "mlx-batch-server": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": "{env:MLX_SERVER_API_KEY}"},
                "models": {
                    "org/qwen": {"name": "org/qwen", "limit": {"context": 40960, "output": 4096}}
                },
            }
        },
        "model": "mlx-batch-server/org/qwen",
        "small_model": "mlx-batch-server/org/qwen",
    }


def test_programs_learn_that_a_model_takes_images(
    server: TalkingServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL, "architecture", {"input_modalities": ["text", "image"]})
    assert not [a for a in printed(server, capsys, "codex")["command"] if "view_image" in a]
    config = printed(server, capsys, "opencode")["env"]["OPENCODE_CONFIG_CONTENT"]
    (provider,) = json.loads(config)["provider"].values()
    (model,) = provider["models"].values()
    assert model["modalities"] == {"input": ["text", "image"], "output": ["text"]}


def test_aider_takes_variables_that_no_file_of_a_project_outranks(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(server, capsys, "aider")
    assert found["command"][:3] == ["aider", "--model", "openai/org/qwen"]
    assert found["env"] == {
        "AIDER_OPENAI_API_BASE": f"{server.url}/v1",
        "AIDER_OPENAI_API_KEY": "none",
    }


def test_what_is_printed_works_in_a_shell(
    server: TalkingServer,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--url", server.url, "--api-key", KEY, "--print"]
    assert run_command(launch, "claude", *flags, "--", "-p", "it's $HOME") == 0
    text = capsys.readouterr().out
    assert KEY not in text
    install(programs, "claude")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("MLX_SERVER_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-anthropic")
    run = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True)
    arguments, variables = json.loads(run.stdout)
    assert arguments == ["-p", "it's $HOME"]
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert "ANTHROPIC_API_KEY" not in variables


def test_keys_are_printed_if_asked_for(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", server.url, "--api-key", KEY, "--print", "--show-keys"]
    assert run_command(launch, "aider", *flags) == 0
    assert f"AIDER_OPENAI_API_KEY={KEY} \\\n  aider --model" in capsys.readouterr().out


@rows(
    ("arguments", "message"),
    [
        ([], "launch needs a program: claude, codex, opencode, aider"),
        (["vim"], "launch knows no program 'vim', but claude, codex, opencode, aider"),
        (["codex", "--help"], "launch: --help is no flag of launch; those of codex follow --"),
        (["codex", "--model"], "launch: --model: expected one argument"),
        (["codex", "--json"], "launch: --json needs --print"),
        (["codex"], "codex is not installed: npm install -g @openai/codex"),
    ],
)
def test_what_cannot_be_started_is_named(
    arguments: list[str], message: str, programs: Path
) -> None:
    with pytest.raises(CommandError) as failed:
        run_command(launch, *arguments)
    assert str(failed.value) == message


def test_a_model_that_the_server_lacks_is_named(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--print", "--url", server.url]
    assert run_command(launch, "codex", *flags, "--model", "gpt") == 1
    assert capsys.readouterr().err == "the server has no model gpt; it has toy\n"
    server.models = {"data": [{"id": "bge", "capabilities": ["embedding"]}]}
    assert run_command(launch, "codex", *flags) == 1
    assert capsys.readouterr().err == "the server has no model that chats\n"


def test_a_loaded_model_that_chats_is_the_default(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = {
        "data": [
            {"id": "bge", "status": {"value": "loaded"}, "capabilities": ["embedding"]},
            {"id": "large", "status": {"value": "unloaded"}, "capabilities": ["completion"]},
            {"id": "small", "status": {"value": "loaded"}, "capabilities": ["completion"]},
        ]
    }
    assert run_command(launch, "--print", "aider", "--url", server.url) == 0
    assert "openai/small" in capsys.readouterr().out
