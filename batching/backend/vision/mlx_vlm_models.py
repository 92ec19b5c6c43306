"""Model files of mlx-vlm, without the rest of it.

The package itself imports a server, loaders and caches; its model files replace `AutoProcessor.from_pretrained` of
transformers by one that trusts code from repositories.  Neither happens here.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from threading import Lock
from types import ModuleType
from typing import Any, Final

from transformers import AutoProcessor

PACKAGE: Final = "mlx_vlm"
_lock: Final = Lock()


class NoVisionModel(Exception):
    """mlx-vlm is not installed, or has no such model; the message says which."""


def model_file(model_type: str) -> ModuleType:
    """Return the module of a model type, which has `Model`, `ModelConfig` and those of its parts.

    model_type: as configs write it, some of them with a hyphen.

    Raises:
        NoVisionModel: there is none.
    """
    with _lock, _bare_package(), _own_auto_processor():
        try:
            return importlib.import_module(f"{PACKAGE}.models.{model_type.replace('-', '_')}")
        except ModuleNotFoundError as error:
            raise NoVisionModel(f"mlx-vlm has no model {model_type} here ({error})") from None


@contextmanager
def _bare_package() -> Iterator[None]:
    """Let modules of the package be found without running its own."""
    if PACKAGE in sys.modules:
        yield
        return
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.submodule_search_locations is None:
        raise NoVisionModel("mlx-vlm is not installed")
    bare = ModuleType(PACKAGE)
    bare.__path__ = [*found.submodule_search_locations]
    bare.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
    sys.modules[PACKAGE] = bare
    yield


@contextmanager
def _own_auto_processor() -> Iterator[None]:
    """Keep the `from_pretrained` of transformers, whatever is imported meanwhile."""
    owner: Any = AutoProcessor
    before = vars(owner)["from_pretrained"]
    try:
        yield
    finally:
        owner.from_pretrained = before
