"""The model that sees: trained once, in a folder of the build that stays."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import openai
import pytest

from scripts.server_process import ROOT, Server

FOLDER: Final = ROOT / "build" / "seeing"


@pytest.fixture(scope="session")
def model() -> Path:
    if not (FOLDER / "model.safetensors").is_file():
        subprocess.run([sys.executable, "-m", "tests.support.seeing", FOLDER], cwd=ROOT, check=True)
    return FOLDER


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    with Server(model=str(model), max_num_seqs="32") as started:
        started.address()
        yield started
        assert started.stop() == 0
        assert "Traceback" not in started.log


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
