"""Image processors of models, in the process of a test instead of one of their own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import numpy as np

from batching.backend.vision import mlx_vlm_models, processor_process
from batching.media.image_processor import ImageProcessor
from batching.model_info.vision import VisionModel

_MODELS_FILE: Final = str(mlx_vlm_models.__file__)


@contextmanager
def _imported_again() -> Iterator[None]:
    """Let model files be imported again, as the worker imports them, and forget what it has changed."""
    device = mx.default_device()
    before = {name: module for name, module in sys.modules.items() if _is_workers(name)}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_workers(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        mx.set_default_device(device)


def _is_workers(name: str) -> bool:
    return name.split(".")[0] in (mlx_vlm_models.PACKAGE, "models")


def save_processor(model_type: str, folder: Path) -> None:
    """Save the processor of a folder there, as mlx-vlm does when it converts a model."""
    with _imported_again():
        kind = processor_process._registered(processor_process._module(_MODELS_FILE), model_type)[
            model_type
        ]
        kind.from_pretrained(folder, local_files_only=True).save_pretrained(folder)


@contextmanager
def processor_of(vision: VisionModel, text: str) -> Iterator[ImageProcessor]:
    """Yield a processor whose process is this one."""
    processor = ImageProcessor(vision, text, 1)
    with _imported_again():
        processor_process.prepare(_MODELS_FILE, str(vision.folder), vision.model_type, text)
        processor._sandbox.ask = processor_process.answer  # type: ignore[method-assign]
        yield processor


@contextmanager
def plain_processor_of(vision: VisionModel) -> Iterator[Any]:
    """Yield the library's processor itself, which takes whole prompts with several pictures."""
    with _imported_again():
        models = processor_process._module(_MODELS_FILE)
        yield processor_process._processor(models, str(vision.folder), vision.model_type)


def picture(height: int, width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
