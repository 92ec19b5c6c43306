"""Keeps what engines have loaded out of the garbage collector's sight while they live."""

import gc
import threading

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


def thaw() -> None:
    """Collect what an engine leaves that has ended; objects of other engines are excluded again."""
    global _num_engines
    with _lock:
        _num_engines = max(0, _num_engines - 1)
        gc.unfreeze()
        gc.collect()
        if _num_engines:
            gc.freeze()
