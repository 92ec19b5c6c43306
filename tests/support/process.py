"""The server as its users have it: a process of its own, behind a socket."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import openai

ROOT = Path(__file__).parents[2]


@dataclass
class Process:
    process: subprocess.Popen[str]
    startup: str
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stop(self) -> int:
        """Ask it to end, as an operator does; return its exit status."""
        self.process.terminate()
        self.process.communicate()
        return self.process.returncode


def start(python: str = sys.executable, /, **settings: str) -> Process:
    """Start it on a free port; `settings` are variables without their prefix."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    named = {f"MLX_SERVER_{name}": value for name, value in settings.items()}
    process = subprocess.Popen(
        [python, "-m", "app"],
        cwd=ROOT,
        env=environment | {"MLX_SERVER_PORT": "0", "MLX_SERVER_DEVICE": "cpu"} | named,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    startup = ""
    for line in process.stderr:
        startup += line
        if found := re.search(r"curl (http://[^/]+)/v1", line):
            return Process(process, startup, found[1])
    raise AssertionError(f"the server did not start:\n{startup}")
