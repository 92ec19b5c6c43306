"""Claude Code, which speaks Anthropic's Messages."""

import json
from pathlib import Path
from typing import Any, Final

from scripts.server_process import Server
from tests.agents.programs import IDLE_TIMEOUT, INSTALLED, MODEL, Workplace, workplace

CLAUDE: Final = INSTALLED / "node_modules" / ".bin" / "claude"
RUN: Final[list[str | Path]] = [
    CLAUDE,
    "-p",
    "--output-format=stream-json",
    "--verbose",
    "--dangerously-skip-permissions",
]


def prepared(home: Path, server: Server) -> Workplace:
    return workplace(
        home,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        # It gives up on headers and on a silent stream, and does not try again in another way.
        CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS=f"{IDLE_TIMEOUT}000",
        CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS=f"{IDLE_TIMEOUT}000",
        CLAUDE_ENABLE_STREAM_WATCHDOG="1",
        CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK="1",
        CLAUDE_CODE_MAX_RETRIES="0",
        # It refuses to skip permissions as root, except in a sandbox.
        IS_SANDBOX="1",
    )


def result(output: str) -> dict[str, Any]:
    """Return the last event of a run."""
    event: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert event["type"] == "result"
    return event
