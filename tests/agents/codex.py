"""Codex, which speaks Responses."""

import json
from pathlib import Path
from typing import Any, Final

from scripts.server_process import Server
from tests.agents.programs import IDLE_TIMEOUT, INSTALLED, MODEL, Workplace, workplace

CODEX: Final = INSTALLED / "node_modules" / ".bin" / "codex"
EXEC: Final[list[str | Path]] = [
    CODEX,
    "exec",
    "--json",
    "--dangerously-bypass-approvals-and-sandbox",
]


def prepared(
    home: Path, server: Server, *, views_images: bool = False, uses_web_socket: bool = False
) -> Workplace:
    folder = home / ".codex"
    folder.mkdir()
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "local"',
        "[features]",
        f"view_image = {str(views_images).lower()}",
        "[model_providers.local]",
        'name = "local"',
        f'base_url = "{server.url}/v1"',
        'wire_api = "responses"',
        f"supports_websockets = {str(uses_web_socket).lower()}",
        "stream_max_retries = 0",
        f"stream_idle_timeout_ms = {IDLE_TIMEOUT}000",
    ]
    (folder / "config.toml").write_text("\n".join(lines))
    return workplace(home, CODEX_HOME=str(folder))


def items(output: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in output.splitlines()]
    return [event["item"] for event in events if event["type"] == "item.completed"]


def usage(output: str) -> dict[str, int]:
    """Return the tokens of a run, over all its requests."""
    found: dict[str, int] = json.loads(output.splitlines()[-1])["usage"]
    return found


def last_message(output: str) -> str:
    texts = [item["text"] for item in items(output) if item["type"] == "agent_message"]
    return str(texts[-1])
