"""One way of running a model after the other, compared with plain forward passes of mlx-lm."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.exceptions import one_line
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.observe import Observation, own_layout
from batching.backend.hooks.regroup import regroup
from batching.backend.hooks.rows import RowSelection, select_rows
from batching.backend.hooks.soft_cap import attend_capped
from batching.backend.paged.layout import CacheLayout
from batching.backend.platform import Platform
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.self_check.differences import row_differences
from batching.backend.self_check.expert_flips import Row, flipping_rows, has_experts
from batching.backend.self_check.steps import SHORT, Script
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.ranks.lockstep.consensus import ALONE, Consensus, largest, union

# Shares of the largest logit: rounding differs with the shape of a product, outputs do not.
_TOLERANCE: Final[dict[mx.Dtype, float]] = {mx.float32: 1e-3}
COARSE_TOLERANCE: Final = 6e-2
# A key midway between two steps of 8 bits rounds either way, and that grows in later layers.
_TOLERANCE_OF_8_BITS: Final = 0.3
# One of so many rows may differ in models with experts, which the last bit may choose.
_ROWS_PER_FLIP: Final = 16
# A share of the rows that must be left when those that flip are not counted.
_MIN_STEADY: Final = 4
_NOT_FINITE: Final = "its logits are not finite"


@dataclass(frozen=True)
class Probe:
    """A model, and what it must give.

    platform: as it serves the model.
    changes: gets the changes of a mode that is known, or needs no comparison.
    expected: the logits of each prompt, `[L, vocab_size]`; empty if no prompts have finite logits.
    observed: how the model uses its caches; None before it could be watched.
    consensus: with other ranks, which take the same steps.
    slices: is called between two steps.
    """

    model: nn.Module
    vocab_size: int
    platform: Platform
    changes: Changes
    prompts: Sequence[Sequence[int]]
    expected: Sequence[mx.array] = ()
    observed: Observation | None = None
    script: Script = SHORT
    consensus: Consensus = ALONE
    slices: LoadSlices = ONE_SLICE

    def fastest(self, first: CheckResult | None = None) -> tuple[CheckedModel, Changes]:
        """Return the fastest mode that is right, and the changes that hook it into the model.

        first: the fastest one that need be tried.
        """
        reason = "" if self.expected else _NOT_FINITE
        if first is not None:
            reason = first.reason
        for each in self._tries(first) if self.expected else ():
            checked, changes = self._made(each._replace(reason=reason))
            try:
                portable = self._on(checked, self.platform.portable(""))
                difference, tolerance = self._difference(portable)
            except Exception as error:
                self.raise_unless_alone()
                # A model's code can do anything with a cache, so it can raise anything.
                reason = reason or f"its code does not run over a paged cache ({error})"
            else:
                if difference <= tolerance:
                    return self._on(checked, self._right_form(checked)), changes
                cause = "a batch" if self.script is SHORT else "a long context"
                reason = reason or (
                    f"{cause} changes its logits by {difference:.2g} of the largest one"
                )
            changes.undo()
        return self.own_caches(reason), Changes()

    def _on(self, checked: CheckedModel, platform: Platform) -> CheckedModel:
        """Return a model on another form of its platform."""
        layout = replace(self, platform=platform).layout(checked.result)
        return replace(checked, layout=layout, platform=platform)

    def _right_form(self, checked: CheckedModel) -> Platform:
        """Return the fastest form of the platform on which a mode is right, too."""
        if not (forms := self.platform.accelerated):
            return self.platform
        if reason := self.platform.unsupported(checked.layout):
            return self.platform.portable(reason)
        for form in forms:
            try:
                difference, tolerance = self._difference(self._on(checked, form))
            except Exception as error:
                self.raise_unless_alone()
                # A kernel that does not compile, among others.
                reason = f"they do not run ({one_line(error)})"
                continue
            if difference <= tolerance:
                return form
            reason = f"they change the logits by {difference:.2g} of the largest one"
        return self.platform.portable(reason)

    def raise_unless_alone(self) -> None:
        """Raise the error that is handled again if other ranks may not have it: they would wait within a step."""
        if not self.consensus.is_alone:
            raise

    def known(self, result: CheckResult) -> CheckedModel:
        """Return a mode that is right, hooked into the model."""
        if result.mode is ExecutionMode.OWN:
            return self.own_caches(result.reason)
        checked, changes = self._made(result)
        self.changes.take(changes)
        return checked

    def own_caches(self, reason: str) -> CheckedModel:
        """Return the mode that is always right: it is mlx-lm's own code from end to end."""
        layout = own_layout(self.model, self.prompts[0])
        regroup(self.model, self.changes)
        platform = self.platform.portable("the model runs on caches of its own")
        result = CheckResult(ExecutionMode.OWN, reason=reason)
        return CheckedModel(platform, layout, RowSelection(), result)

    def layout(self, result: CheckResult) -> CacheLayout:
        if result.mode is ExecutionMode.OWN:
            return own_layout(self.model, self.prompts[0])
        layout = self._observed.layout(gathers_all=result.gathers_all)
        kv_dtype = self.platform.kv_dtype
        if kv_dtype is None or (kv_dtype == mx.int8 and not self.platform.holds_int8):
            return layout
        return layout.with_dtype(kv_dtype)

    @property
    def _observed(self) -> Observation:
        assert self.observed is not None, "a model is watched before it is tried"
        return self.observed

    def _made(self, result: CheckResult) -> tuple[CheckedModel, Changes]:
        selection = RowSelection()
        checked = CheckedModel(self.platform, self.layout(result), selection, result)
        return checked, self._change(result, selection)

    def _tries(self, first: CheckResult | None) -> Iterator[CheckResult]:
        """Yield `first`, if there is one, and the modes that are slower."""
        if first is None:
            yield from self._modes()
            return
        yield first
        this_and_slower = dropwhile(lambda each: each[:2] != first[:2], self._modes())
        next(this_and_slower, None)
        yield from this_and_slower

    def _modes(self) -> Iterator[CheckResult]:
        has_pieces = bool(self._observed.to_regroup())
        yield CheckResult(
            ExecutionMode.PIECES if has_pieces else ExecutionMode.RAGGED, gathers_all=False
        )
        gathered = self._observed.layout(gathers_all=True)
        if gathered != self._observed.layout():
            yield CheckResult(ExecutionMode.PIECES)
        yield CheckResult(ExecutionMode.ONE_BY_ONE)
        if not gathered.has_own:
            yield CheckResult(ExecutionMode.WHOLE)

    def _change(self, result: CheckResult, selection: RowSelection) -> Changes:
        """Hook a mode into the model."""
        changes = Changes()
        if result.mode is ExecutionMode.WHOLE:
            regroup(self.model, changes)
            return changes
        for module in () if result.gathers_all else self._observed.to_cap():
            attend_capped(module, changes)
        for module in self._observed.to_regroup(gathers_all=result.gathers_all):
            regroup(module, changes)
        select_rows(self.model, selection, changes)
        self.platform.hook_mode(self.model, changes)
        return changes

    def _difference(self, checked: CheckedModel) -> tuple[float, float]:
        """Return how far a logit is off, and how far it may be."""
        layout = self._observed.layout(gathers_all=checked.result.gathers_all)
        plain = replace(checked, layout=layout, platform=checked.platform.unrounded)
        tolerance = tolerance_of(layout)
        most = self._largest(self._differences(plain), tolerance)
        if most > tolerance or plain == checked:
            return most, tolerance
        rounded = np.sort(list(self._differences(checked).values()))
        if not math.isfinite(rounded[-1]):
            return math.nan, tolerance
        if has_experts(self.model):
            # Rounding may lead to other experts, in all rows: that says nothing of the mode.
            return most, tolerance
        has_int8 = any(shape.dtype == mx.int8 for shape in checked.layout.shapes)
        of_keys = _TOLERANCE_OF_8_BITS if has_int8 else COARSE_TOLERANCE
        return float(rounded[-1]), max(tolerance, of_keys)

    def _differences(self, checked: CheckedModel) -> dict[Row, float]:
        found = row_differences(
            self.model,
            self.vocab_size,
            checked,
            self.prompts,
            self.expected,
            self.script,
            self.slices,
        )
        agreed: list[float] = self.consensus.choose([*found.values()], largest)
        return dict(zip(found, agreed, strict=True))

    def _largest(self, differences: Mapping[Row, float], tolerance: float) -> float:
        """Return the largest one; NaN if one is not a number.

        The last bit may choose other experts: rows that flip so by less than rounding do not count, if
        others are left, and of these the few that differ most do not.
        """
        ordered = np.sort(list(differences.values()))
        if not (math.isfinite(ordered[-1]) and has_experts(self.model)):
            return float(ordered[-1])
        most = float(ordered[-1 - len(ordered) // _ROWS_PER_FLIP])
        if most <= tolerance:
            return most
        found = flipping_rows(self.model, self.prompts, self.expected, tolerance, self.slices)
        flipping = self.consensus.choose([[*row] for row in found], union)
        steady = np.sort([off for row, off in differences.items() if [*row] not in flipping])
        if len(steady) * _MIN_STEADY < len(ordered):
            return most
        return float(steady[-1 - len(steady) // _ROWS_PER_FLIP])


def tolerance_of(layout: CacheLayout) -> float:
    """Return how far a logit may be off by rounding, as a share of the largest."""
    dtypes = {shape.dtype for shape in layout.shapes} or {mx.float32}
    return max(_TOLERANCE.get(dtype, COARSE_TOLERANCE) for dtype in dtypes)
