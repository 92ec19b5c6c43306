"""opencode, which speaks chat completions."""

import json
from pathlib import Path
from typing import Any, Final

from scripts.server_process import Server
from tests.agents.programs import IDLE_TIMEOUT, INSTALLED, MODEL, Workplace, workplace

RUN: Final[list[str | Path]] = [
    INSTALLED / "node_modules" / ".bin" / "opencode",
    "run",
    "--format",
    "json",
]


def prepared(home: Path, server: Server, **of_model: Any) -> Workplace:
    place = workplace(home, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1")
    model = {"name": MODEL, "limit": {"context": 65_536, "output": 4096}} | of_model
    timeouts = dict.fromkeys(("headerTimeout", "chunkTimeout"), IDLE_TIMEOUT * 1000)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "none"} | timeouts,
        "models": {MODEL: model},
    }
    name = f"local/{MODEL}"
    config: dict[str, Any] = {"provider": {"local": provider}, "model": name, "small_model": name}
    (place.folder / "opencode.json").write_text(json.dumps(config))
    return place


def texts(output: str) -> list[str]:
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [event["part"]["text"] for event in events if event["type"] == "text"]
