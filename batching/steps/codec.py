"""Plans as bytes, for an executor in another process or on another machine."""

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, EnumType
from typing import Any, Final, cast

from batching.adapters.adapter import Adapter
from batching.adapters.slots import AdapterLoad
from batching.block_manager import BlockCopy, BlockIds, Run
from batching.block_store.keys import Key, Kind
from batching.constraints.grammar import Grammar
from batching.constraints.protocol import AllowedTokens, Constraint
from batching.constraints.thinking import ThinkingBudget, ThinkingLimit, TokenBytes
from batching.inputs.images import ImageInput, PlacedImage, Span, TowerArray
from batching.inputs.retention import RetainedPrefix, Retention
from batching.inputs.sampling_params import DryParams, SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.pooling import PoolingParams, PoolingType
from batching.priority_queue import Priority
from batching.steps.step_plan import (
    EncodeOrder,
    RestoreOrder,
    SaveOrder,
    Slice,
    StartedSequence,
    StateCopy,
    StepPlan,
)

# A plan is made of these, of numbers, texts and tuples: nothing else is read.
_CLASSES: Final = (
    *(StepPlan, StartedSequence, Slice, EncodeOrder, StateCopy, BlockCopy, BlockIds, Run),
    *(
        SequenceSpec,
        SamplingParams,
        DryParams,
        PoolingParams,
        PoolingType,
        Priority,
        Retention,
        RetainedPrefix,
    ),
    *(AllowedTokens, Grammar, ThinkingBudget, ThinkingLimit, frozenset),
    *(ImageInput, PlacedImage, Span, TowerArray),
    *(SaveOrder, RestoreOrder, Key, Kind),
    *(Adapter, AdapterLoad),
)
_BY_NAME: Final = {(each.__module__, each.__qualname__): each for each in _CLASSES}


class InvalidPlan(Exception):
    """Bytes that are no plan."""


def encode(plan: StepPlan) -> bytes:
    """Return a plan as bytes; a grammar is written as its text."""
    return pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)


def decode(
    data: bytes,
    compile_grammar: Callable[[Grammar], Grammar],
    token_bytes: TokenBytes | None = None,
) -> StepPlan:
    """Return the plan of these bytes, which may come from anybody: no code is looked up in them.

    compile_grammar: returns a grammar that has matchers in this process, of one that is only a text.
    token_bytes: of the model's vocabulary, for budgets of thinking; without it these have no matchers.

    Raises:
        InvalidPlan: the bytes are no plan.
    """
    try:
        plan = _Reader(io.BytesIO(data)).load()
    except Exception as error:
        raise InvalidPlan("the bytes are no plan") from error
    if not isinstance(plan, StepPlan):
        raise InvalidPlan(f"the bytes are a {type(plan).__name__}, not a plan")

    def compiled(constraint: Constraint | None) -> Constraint | None:
        if isinstance(constraint, ThinkingBudget):
            return ThinkingBudget(constraint.limit, compiled(constraint.inner), token_bytes)
        return compile_grammar(constraint) if isinstance(constraint, Grammar) else constraint

    return replace(
        plan,
        started=tuple(
            replace(s, spec=replace(s.spec, constraint=compiled(s.spec.constraint)))
            for s in plan.started
        ),
    )


class _Reader(pickle.Unpickler):
    """Finds the classes of plans, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (found := _BY_NAME.get((module, name))) is not None:
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plan")


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration, which early versions of Python 3.11 write as an attribute of its class."""
    if isinstance(kind, EnumType) and kind in _CLASSES and name in kind.__members__:
        return cast(Enum, kind.__members__[name])
    raise pickle.UnpicklingError(f"{name} is no part of a plan")
