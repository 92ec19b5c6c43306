"""llm-comply's suites, one for each API, against a live server.

Left out are cases of images, as this model takes none, of a request without `model`, which is the default one here,
and of calls and an answer that a model of this size may not end: other tests have both.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from scripts.server_process import MODEL, Server

_MANY: Final = (
    "{0}basic-response,{0}system-prompt,{0}multi-turn,{0}streaming-response,{0}streaming-usage"
)
SUITES: Final = {
    "open-responses": _MANY.format("") + ",assistant-phase,tool-calling",
    "openai-chat": _MANY.format("chat-"),
    "anthropic": _MANY.format("anth-"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Arguments that the model goes on with end with the context.
    with Server(python=os.environ["SERVER_PYTHON"], max_model_len="512") as started:
        yield started
        assert started.stop() == 0


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_passes(server: Server, suite: str) -> None:
    command = [sys.executable, "-m", "llm_comply.cli", "run", "--json", "--format", suite]
    options = ["-u", f"{server.url}/v1", "-k", "none", "-m", MODEL, "-f", SUITES[suite]]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["summary"]["passed"] == len(SUITES[suite].split(","))
