"""No variable, file or history of the machine reaches a command under test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.talking_server import TalkingServer, talking_server


@pytest.fixture(autouse=True)
def nothing_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("MLX_SERVER_", "OPENAI_", "ANTHROPIC_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server() -> Iterator[TalkingServer]:
    with talking_server() as talking:
        yield talking
