"""Keeps what engines have loaded out of the garbage collector's sight while they live."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_engines = 0


def freeze() -> None:
    """Exclude all objects that are there from collections, for an engine that has just been loaded.

    They stay: without this every full collection would traverse all of them.
    """
    global _num_engines
    with _lock:
        _num_engines += 1
        gc.freeze()


@contextmanager
def thawed() -> Iterator[None]:
    """Let an engine end: what it leaves can be collected within; objects of other engines are excluded again."""
    global _num_engines
    with _lock:
        _num_engines -= 1
        gc.unfreeze()
    try:
        yield
    finally:
        with _lock:
            if _num_engines:
                gc.freeze()
