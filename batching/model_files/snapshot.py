"""Whether a copy of a hub repository has all that mlx-lm reads."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

CONFIG: Final = "config.json"
WEIGHTS: Final = "model*.safetensors"
# Models of some types are read without any.
TOKENIZER: Final = "tokenizer*"


def missing_files(snapshot: Path) -> set[str]:
    """Return what a copy lacks: another program may have wanted only some of the files."""
    missing = {name for name in (CONFIG, WEIGHTS, TOKENIZER) if not any(snapshot.glob(name))}
    there = {path.name for path in snapshot.glob(WEIGHTS)}
    named = {name for name in _indexed(snapshot) if fnmatch(name, WEIGHTS)}
    # None is there of an index that has stayed from another build of the model; mlx-lm reads none.
    return missing | (named - there if named & there else set())


def _indexed(snapshot: Path) -> set[str]:
    """Return the files that an index names."""
    try:
        text = (snapshot / "model.safetensors.index.json").read_text(encoding="utf-8")
        return {str(name) for name in json.loads(text)["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()
