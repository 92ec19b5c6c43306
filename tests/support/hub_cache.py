"""A hub's cache of a test's own, and the hub that it is filled from."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hub import Hub, running_hub


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let the hub's client have its cache in a folder, and no settings of this machine."""
    for name in [*os.environ]:
        if name.startswith(("HF_", "MLX_SERVER_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    cache = folder / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "token"))
    return cache


@contextmanager
def hub_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a hub, and let the client use it; it does not wait between its tries."""
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        yield hub
