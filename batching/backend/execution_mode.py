"""The part of a model that runs for all rows of a step at once: the result of the self-check."""

from enum import StrEnum
from typing import NamedTuple


class ExecutionMode(StrEnum):
    """The part of a model that runs for all rows of a step at once; the fastest mode first.

    RAGGED: the whole model.
    PIECES: all but modules with a recurrent state or with attention of their own; these get prompt chunks
        one by one, and all decodes together.
    ONE_BY_ONE: all but these modules, which get one request at a time.
    WHOLE: the model runs for one request at a time, on the pool.
    OWN: the model runs for one request at a time, on caches of its own.
    """

    RAGGED = "ragged"
    PIECES = "pieces"
    ONE_BY_ONE = "one by one"
    WHOLE = "whole model"
    OWN = "own caches"


class CheckResult(NamedTuple):
    """The mode in which a model is served, in the form in which it is stored.

    gathers_all: the keys and values of all layers are gathered, in case attention reads more of the
        cache than was observed.
    reason: why faster modes are wrong, for the operator; empty if there is no faster one.
    """

    mode: ExecutionMode
    gathers_all: bool = True
    reason: str = ""
