"""Headline figures that others can repeat: GuideLLM's load on this server, without a network.

`python -m scripts.guidellm PATH_OF_GUIDELLM FOLDER [OPTION ...]` starts the server with the
MLX_SERVER_* settings of the environment, and leaves GuideLLM's report in the folder as JSON and
HTML.  Options are those of `guidellm run`; they replace the load that is the default here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from batching.backend.gguf.tokenizer import build_tokenizer
from batching.backend.loader import resolve
from batching.model_files.gguf_header import read_header
from scripts.server_process import MODEL, Server, environment_settings

# Numbers of requests in flight, half a minute each.
_LOAD: Final = (
    *("--profile", "kind=concurrent,streams=1"),
    *("--override", "profile.streams", "1,2,4,8,16"),
    *("--constraint", "kind=max_duration,seconds=30"),
    *("--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=64"),
)
# Greedy; and usage comes once, at the end, which is all that this server offers.
_BODY: Final = {"temperature": 0, "stream_options": {"continuous_usage_stats": False}}


def main(words: Sequence[str]) -> int:
    if len(words) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    guidellm, folder, *options = words
    settings = {"generation_config": "openai"} | environment_settings()
    with TemporaryDirectory() as tokenizer, Server(**settings) as server:
        save_tokenizer(settings.get("model", MODEL), Path(tokenizer))
        command = [guidellm, *arguments(server.url, tokenizer, folder), *(options or _LOAD)]
        # Everything is on this machine; the hub would be asked for the tokenizer's newest version.
        return subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode


def arguments(url: str, tokenizer: str, folder: str) -> list[str]:
    backend = {"kind": "openai_http", "target": url, "extras": {"body": _BODY}}
    return [
        "run",
        f"--backend={json.dumps(backend)}",
        f"--tokenizer=kind=huggingface_auto,model={tokenizer}",
        "--disable-console-interactive",
        "--output=kind=console",
        f"--output=kind=json,path={folder}/guidellm.json",
        f"--output=kind=html,path={folder}/guidellm.html",
    ]


def save_tokenizer(model: str, folder: Path) -> None:
    """Write the tokenizer as transformers reads it; GuideLLM makes prompts of so many tokens."""
    path = resolve(model)
    if path.is_dir():
        for file in path.glob("*token*"):
            (folder / file.name).symlink_to(file)
        return
    # `Any` because the wrapper hands everything on to the tokenizer.
    tokenizer: Any = build_tokenizer(read_header(path))
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
