"""Damages a model file in many ways and loads it; run as a process that may crash.

    python -m tests.support.damaged_files FILE SEED COUNT

Prints how many were loaded and how many rejected.  FILE is a GGUF file, or the directory
of a model whose `model.safetensors` is damaged.
"""

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import batching.backend  # noqa: F401
from batching.backend.loader import load_model
from batching.errors import ModelLoadError

# Made-up values of a field.
_FIELDS: Final = (0, 1, 7, 31, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)


def damaged(content: bytes, header_size: int, rng: random.Random) -> bytes:
    """Return a file with one to three faults, most of them in its header."""
    for _ in range(rng.randint(1, 3)):
        size = len(content) if rng.random() < 0.1 else min(header_size, len(content))
        at = rng.randrange(size or 1)
        length = rng.choice((1, 4, 8, 12, 40))
        match rng.randrange(7):
            case 0:
                replacement = bytes([rng.randrange(256)])
                content = content[:at] + replacement + content[at + 1 :]
            case 1 | 2:
                field = rng.choice(_FIELDS).to_bytes(8, "little")[: rng.choice((1, 4, 8))]
                content = content[:at] + field + content[at + len(field) :]
            case 3:
                content = content[:at] + content[at + length :]
            case 4:
                content = content[:at] + content[at : at + length] + content[at:]
            case 5:
                other = rng.randrange(size or 1)
                part = content[other : other + length]
                content = content[:at] + part + content[at + length :]
            case _:
                content = content[: rng.randrange(len(content) or 1)]
    return content


def main(path: Path, seed: int, count: int) -> None:
    weights = path / "model.safetensors" if path.is_dir() else path
    content = weights.read_bytes()
    rng = random.Random(seed)
    header_size = int.from_bytes(content[:8], "little") + 8 if path.is_dir() else 12_000
    results: Counter[str] = Counter()
    for _ in range(count):
        weights.write_bytes(damaged(content, header_size, rng))
        results[outcome(path)] += 1
    sys.stdout.write(", ".join(f"{count} {what}" for what, count in sorted(results.items())))


def outcome(path: Path) -> str:
    try:
        load_model(str(path), dtype=None)
    except ModelLoadError as error:
        return "rejected in several lines" if "\n" in str(error) else "rejected"
    return "loaded"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
