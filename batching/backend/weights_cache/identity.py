"""Makes a digest of everything that packed weights depend on."""

import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("mlx", "mlx-lm", "gguf", "numpy")
_CODE: Final = Path(__file__).parents[1]
_KERNELS: Final = "mlx_cpu_kernels"
_MODEL_PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "config.json", "*.py")
_HEAD_BYTES: Final = 1 << 16
_SAMPLE_BYTES: Final = 1 << 12
_NUM_SAMPLES: Final = 64


def identity(model: Path, **options: object) -> str:
    """Return a digest of a model's files, of this program, and of the options that it packs with."""
    files = [[path.name, *_state(path)] for path in _files(model)]
    packages = [[name, version(name)] for name in _PACKAGES]
    return _digest([files, packages, _code(), options])


def short_digest(*parts: object) -> str:
    """Return some letters that tell one from another."""
    return _digest(parts)[:16]


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _files(model: Path) -> Iterator[Path]:
    if model.is_file():
        yield model
        return
    for pattern in _MODEL_PATTERNS:
        yield from sorted(model.glob(pattern))


def _state(path: Path) -> tuple[int, int, str]:
    """Return a file's size, its time, and a digest of its begin and of samples.

    One that cannot be read, as a link to nothing, is nothing that the model was loaded from.
    """
    digest = hashlib.sha256()
    try:
        stat = path.stat()
        with path.open("rb", buffering=0) as file:
            digest.update(file.read(_HEAD_BYTES))
            for index in range(_NUM_SAMPLES + 1):
                last = max(0, stat.st_size - _SAMPLE_BYTES)
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, last * index // _NUM_SAMPLES))
    except OSError:
        return 0, 0, ""
    return stat.st_size, stat.st_mtime_ns, digest.hexdigest()


def _code() -> str:
    """Return a digest of what reads and packs: a change of it may be one of the weights."""
    digest = hashlib.sha256()
    for folder, pattern in ((_CODE, "**/*.py"), *((path, "_native*.so") for path in _kernels())):
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _kernels() -> list[Path]:
    """Return where the kernels' package is, if it is installed."""
    spec = find_spec(_KERNELS)
    places = spec.submodule_search_locations if spec else None
    return [Path(place) for place in places or ()]
