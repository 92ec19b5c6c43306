"""An environment without settings."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the developer's own variables and `.env` out of the tests."""
    for name in [name for name in os.environ if name.upper().startswith("MLX_SERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
