"""The self-check at load: finds the fastest way in which a model is served correctly from the pool."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.devices import Gpu
from batching.backend.exceptions import one_line
from batching.backend.hooks.attention import hook_attention
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.flat_rows import flatten_rows
from batching.backend.hooks.observe import Observation, own_layout
from batching.backend.hooks.per_head import join_rows
from batching.backend.hooks.ranges import hook_ranges
from batching.backend.hooks.regroup import regroup
from batching.backend.hooks.rows import RowSelection, select_rows
from batching.backend.hooks.sizes import shrink_sizes
from batching.backend.hooks.soft_cap import attend_capped
from batching.backend.paged.layout import CacheLayout
from batching.backend.platforms.cpu.layers.replace import min_input_bits
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.kernel_pool import why_not
from batching.backend.platforms.gpu.pool_kernels import ON_CPU, NoKernels, PoolKernels
from batching.backend.platforms.gpu.rotations import remember_rotations
from batching.backend.self_check.differences import row_differences
from batching.backend.self_check.leaps import Row, has_experts, leaping_rows, plain_logits
from batching.backend.self_check.long_steps import LONG, MAX_TOKENS, MIN_TOKENS, long_prompt
from batching.backend.self_check.steps import SHORT, Script, probe_prompts
from batching.backend.self_check.verdict import CheckedModel, Verdict, Way

# Of the largest logit: rounding differs with the shape of a product, outputs do not.
_TOLERANCE: Final[dict[mx.Dtype, float]] = {mx.float32: 1e-3}
_COARSE_TOLERANCE: Final = 6e-2
# A key midway between two steps of 8 bits rounds either way, and that grows in later layers.
_TOLERANCE_OF_8_BITS: Final = 0.3
# Of so many rows one may differ in models with experts, which the last bit may choose.
_ROWS_PER_LEAP: Final = 16
# A share of the rows that must be left when those that leap are not counted.
_MIN_STEADY: Final = 4
_FLOAT_BITS: Final = 32
# A token of a damaged model may have no finite logits; the others are served.
_SALTS: Final = range(8)


def check_model(
    model: nn.Module,
    vocab_size: int,
    native: Native | None = None,
    kv_dtype: mx.Dtype | None = None,
    known: Verdict | None = None,
    *,
    gpu: Gpu | None = None,
    kernels: PoolKernels | NoKernels = ON_CPU,
    max_model_len: int = MAX_TOKENS,
    changes: Changes | None = None,
) -> CheckedModel:
    """Return the fastest way of serving a model that gives the right logits, hooked into the model.

    Steps over the paged pool are compared with plain forward passes of mlx-lm: prompts of different
    lengths are prefilled in chunks, mixed with decodes, over scattered blocks, with a cached prefix and
    wrong drafts, and the logits of every token must be equal up to rounding.  Meanwhile windows and
    similar sizes of the model are reduced, so that these short prompts exceed them, and positions that
    have left a window are NaN.  On a GPU, steps over a long context follow, with all sizes as they are.

    native: the native CPU kernels; None if they are not used.
    kv_dtype: the type of keys and values; int8 needs kernels.  None is the type in which the model makes
        them, which also applies if the kernels of a GPU turn out to be wrong.
    known: the result of an earlier check of the same model; nothing is compared then.
    kernels: the kernels of a GPU's pool; they are used if the same steps are right with them.
    max_model_len: bounds the long context, in tokens.
    """
    changes = changes or Changes()
    if gpu is Gpu.CUDA:
        flatten_rows(model, changes)
    hook_attention(model, changes)
    hook_ranges(model, changes)
    join_rows(model, changes)
    try:
        Observation(model, [0, 1]).layout()
    except Exception as error:
        # Its caches must be of the very class that it makes, perhaps.
        reason = f"its caches cannot be watched ({error})"
        return _own_caches(model, probe_prompts(vocab_size)[0], native, reason, gpu)
    if known is not None:
        prompts = probe_prompts(vocab_size)
        observed = Observation(model, prompts[0])
        probe = _Probe(model, vocab_size, native, kv_dtype, gpu, kernels, prompts, [], observed)
        return probe.known(known)
    sizes = _shrunk_sizes(model, vocab_size)
    prompts, expected = _plain_logits(model, [probe_prompts(vocab_size, n) for n in _SALTS])
    observed = Observation(model, prompts[0])
    probe = _Probe(model, vocab_size, native, kv_dtype, gpu, kernels, prompts, expected, observed)
    checked, changes = probe.fastest()
    has_real_sizes = not sizes.undo()
    if gpu is not None and checked.way is not Way.OWN:
        changes.undo()
        probe = replace(probe, kernels=checked.kernels, keeps_graphs=checked.keeps_graphs)
        return _over_long_context(probe, checked.verdict, min(MAX_TOKENS, max_model_len))
    if has_real_sizes:
        return checked
    real = replace(probe, observed=Observation(model, prompts[0]))
    return replace(checked, layout=real.layout(checked.verdict))


def _over_long_context(probe: "_Probe", verdict: Verdict, num_tokens: int) -> CheckedModel:
    """Return the fastest way, from one that is right over a short context on, that is right over a long one."""
    observed = Observation(probe.model, probe.prompts[0])
    probe = replace(probe, observed=observed)
    if num_tokens < MIN_TOKENS:
        return probe.known(verdict)
    tries = [[long_prompt(probe.vocab_size, num_tokens, salt)] for salt in _SALTS]
    prompts, expected = _plain_logits(probe.model, tries)
    if not expected:
        return probe.known(verdict)
    long = replace(probe, prompts=2 * prompts, expected=2 * expected, script=LONG)
    return long.fastest(verdict)[0]


def _shrunk_sizes(model: nn.Module, vocab_size: int) -> Changes:
    """Shrink windows and the like, unless the model then contradicts itself."""
    changes = Changes()
    if shrink_sizes(model, changes):
        prompt = probe_prompts(vocab_size)[0]
        try:
            whole, pieces = (
                plain_logits(model, [prompt]),
                plain_logits(model, [prompt[:20], prompt[20:]]),
            )
            is_same = float(mx.abs(whole - pieces).max() / mx.abs(whole).max()) < _COARSE_TOLERANCE
        except Exception:
            is_same = False
        if not is_same:
            changes.undo()
    return changes


@dataclass(frozen=True)
class _Probe:
    """A model, and what it must give: `expected` is empty if no prompts have finite logits."""

    model: nn.Module
    vocab_size: int
    native: Native | None
    kv_dtype: mx.Dtype | None
    gpu: Gpu | None
    kernels: PoolKernels | NoKernels
    prompts: Sequence[Sequence[int]]
    expected: Sequence[mx.array]
    observed: Observation
    script: Script = SHORT
    keeps_graphs: bool = True

    def fastest(self, first: Verdict | None = None) -> tuple[CheckedModel, Changes]:
        """Return the fastest way that is right, and the changes that hook it into the model.

        first: the fastest one that need be tried.
        """
        reason = "" if self.expected else "its logits are not finite"
        if first is not None:
            reason = first.reason
        for each in self._tries(first) if self.expected else ():
            checked, changes = self._made(each._replace(reason=reason))
            try:
                portable = self._portable(checked)
                difference, tolerance = self._difference(portable)
            except Exception as error:
                # A model's code can do anything with a cache, so it can raise anything.
                reason = reason or f"its code does not run over a paged cache ({error})"
            else:
                if difference <= tolerance:
                    kernels, keeps_graphs = self._right_kernels(checked)
                    right = portable if isinstance(kernels, NoKernels) else checked
                    return replace(right, kernels=kernels, keeps_graphs=keeps_graphs), changes
                cause = "a batch" if self.script is SHORT else "a long context"
                reason = reason or (
                    f"{cause} changes its logits by {difference:.2g} of the largest one"
                )
            changes.undo()
        return _own_caches(self.model, self.prompts[0], self.native, reason, self.gpu), Changes()

    def _portable(self, checked: CheckedModel) -> CheckedModel:
        """Return a model on the pool of a GPU without kernels."""
        layout = replace(self, kernels=ON_CPU).layout(checked.verdict)
        return replace(checked, layout=layout, kernels=ON_CPU)

    def _right_kernels(self, checked: CheckedModel) -> tuple[PoolKernels | NoKernels, bool]:
        """Return the kernels of the pool if a way is right with them, too, else why it is not.

        And whether it is so if the graphs of steps are kept.
        """
        if isinstance(checked.kernels, NoKernels):
            return checked.kernels, False
        if reason := why_not(checked.kernels, checked.layout):
            return NoKernels(reason), False
        for keeps_graphs in (True, False) if self.keeps_graphs else (False,):
            try:
                difference, tolerance = self._difference(
                    replace(checked, keeps_graphs=keeps_graphs)
                )
            except Exception as error:
                # A kernel that does not compile, among others.
                reason = f"they do not run ({one_line(error)})"
                continue
            if difference <= tolerance:
                return checked.kernels, keeps_graphs
            reason = f"they change the logits by {difference:.2g} of the largest one"
        return NoKernels(reason), False

    def known(self, verdict: Verdict) -> CheckedModel:
        """Return a way that is right, hooked into the model."""
        if verdict.way is Way.OWN:
            return _own_caches(self.model, self.prompts[0], self.native, verdict.reason, self.gpu)
        return self._made(verdict)[0]

    def _made(self, verdict: Verdict) -> tuple[CheckedModel, Changes]:
        selection = RowSelection()
        checked = CheckedModel(
            self.layout(verdict),
            selection,
            verdict,
            self.native,
            _rounds_inputs(self.model),
            self.gpu,
            self.kernels,
            self.keeps_graphs,
        )
        return checked, self._change(verdict, selection)

    @property
    def _in_8_bits(self) -> bool:
        return self.kv_dtype is not None and self.kv_dtype == mx.int8

    def layout(self, made: Verdict) -> CacheLayout:
        if made.way is Way.OWN:
            return own_layout(self.model, self.prompts[0])
        layout = self.observed.layout(gathers_all=made.gathers_all)
        has_kernels = self.native is not None or not isinstance(self.kernels, NoKernels)
        if self.kv_dtype is None or (self._in_8_bits and not has_kernels):
            return layout
        return layout.with_dtype(self.kv_dtype)

    def _tries(self, first: Verdict | None) -> Iterator[Verdict]:
        """Yield `first`, if there is one, and the ways that are slower."""
        if first is None:
            yield from self._ways()
            return
        yield first
        this_and_slower = dropwhile(lambda each: each[:2] != first[:2], self._ways())
        next(this_and_slower, None)
        yield from this_and_slower

    def _ways(self) -> Iterator[Verdict]:
        first = Way.PIECES if self.observed.to_regroup() else Way.RAGGED
        yield Verdict(first, gathers_all=False)
        gathered = self.observed.layout(gathers_all=True)
        if gathered != self.observed.layout():
            yield Verdict(Way.PIECES)
        yield Verdict(Way.ONE_BY_ONE)
        if not gathered.has_own:
            yield Verdict(Way.WHOLE)

    def _change(self, made: Verdict, selection: RowSelection) -> Changes:
        """Hook a way into the model."""
        changes = Changes()
        if made.way is Way.WHOLE:
            regroup(self.model, changes)
            return changes
        for module in () if made.gathers_all else self.observed.to_cap():
            attend_capped(module, changes)
        for module in self.observed.to_regroup(gathers_all=made.gathers_all):
            regroup(module, changes)
        select_rows(self.model, selection, changes)
        # What knows what it was made from is a copy if MLX computes it, as where keys are rounded to 8 bits.
        if not isinstance(self.kernels, NoKernels) and not self._in_8_bits:
            remember_rotations(self.model, changes)
        return changes

    def _difference(self, checked: CheckedModel) -> tuple[float, float]:
        """Return how far a logit is off, and how far it may be."""
        layout = replace(self, kv_dtype=None).layout(checked.verdict)
        plain = replace(checked, layout=layout, rounds_inputs=False)
        tolerance = self._tolerance(layout)
        largest = self._largest(self._differences(plain), tolerance)
        if largest > tolerance or plain == checked:
            return largest, tolerance
        rounded = np.sort(list(self._differences(checked).values()))
        if not math.isfinite(rounded[-1]):
            return math.nan, tolerance
        if has_experts(self.model):
            # What is rounded may lead to other experts, in all rows: that says nothing of the way.
            return largest, tolerance
        has_int8 = any(shape.dtype == mx.int8 for shape in checked.layout.shapes)
        of_keys = _TOLERANCE_OF_8_BITS if has_int8 else _COARSE_TOLERANCE
        return float(rounded[-1]), max(tolerance, of_keys)

    def _tolerance(self, layout: CacheLayout) -> float:
        dtypes = {shape.dtype for shape in layout.shapes} or {mx.float32}
        return max(_TOLERANCE.get(dtype, _COARSE_TOLERANCE) for dtype in dtypes)

    def _differences(self, checked: CheckedModel) -> dict[Row, float]:
        return row_differences(
            self.model, self.vocab_size, checked, self.prompts, self.expected, self.script
        )

    def _largest(self, differences: Mapping[Row, float], tolerance: float) -> float:
        """Return the largest one; NaN if one is not a number.

        The last bit may choose other experts: rows that leap by less than rounding do not count, if
        others are left, and of these the few that differ most do not.
        """
        ordered = np.sort(list(differences.values()))
        if not (math.isfinite(ordered[-1]) and has_experts(self.model)):
            return float(ordered[-1])
        largest = float(ordered[-1 - len(ordered) // _ROWS_PER_LEAP])
        if largest <= tolerance:
            return largest
        leaping = leaping_rows(self.model, self.prompts, self.expected, tolerance)
        steady = np.sort([off for row, off in differences.items() if row not in leaping])
        if len(steady) * _MIN_STEADY < len(ordered):
            return largest
        return float(steady[-1 - len(steady) // _ROWS_PER_LEAP])


def _own_caches(
    model: nn.Module,
    tokens: Sequence[int],
    native: Native | None,
    reason: str,
    gpu: Gpu | None,
) -> CheckedModel:
    """Return the way that is always right: it is mlx-lm's own code from end to end."""
    layout = own_layout(model, tokens)
    regroup(model, Changes())
    verdict = Verdict(Way.OWN, reason=reason)
    kernels = NoKernels("the model runs on caches of its own") if gpu else ON_CPU
    return CheckedModel(
        layout, RowSelection(), verdict, native, _rounds_inputs(model), gpu, kernels
    )


def _rounds_inputs(model: nn.Module) -> bool:
    return min_input_bits(model) < _FLOAT_BITS


def _plain_logits(
    model: nn.Module, tries: Sequence[list[list[int]]]
) -> tuple[list[list[int]], list[mx.array]]:
    """Return the first prompts that give finite logits, with these, `[L, vocab_size]` of each; else the last, and none."""
    for prompts in tries:
        logits = [plain_logits(model, [prompt]) for prompt in prompts]
        if all(bool(mx.isfinite(rows).all()) for rows in logits):
            return prompts, logits
    return prompts, []
