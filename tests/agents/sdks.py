"""SDKs of npm, each in a script that prints what it got as JSON."""

import json
from pathlib import Path
from typing import Any

from scripts.server_process import Server
from tests.agents.programs import IDLE_TIMEOUT, INSTALLED, MODEL, workplace

SCRIPTS = Path(__file__).parent / "sdk"


def run_script(home: Path, server: Server, name: str) -> dict[str, Any]:
    """Run a script from where its packages are installed."""
    place = workplace(home)
    script = INSTALLED / f"{name}.mjs"
    script.write_text((SCRIPTS / f"{name}.mjs").read_text())
    ended = place.run(["node", script, server.url, MODEL, f"{IDLE_TIMEOUT}000"])
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
