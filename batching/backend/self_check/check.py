"""The self-check at load: finds the fastest way in which a model is served correctly from the pool."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.hooks.attention import hook_attention
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.layers import in_slices
from batching.backend.hooks.observe import Observation
from batching.backend.hooks.per_head import join_rows
from batching.backend.hooks.ranges import hook_ranges
from batching.backend.hooks.sizes import shrink_sizes
from batching.backend.platform import Platform
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.self_check.expert_flips import plain_logits
from batching.backend.self_check.long_steps import LONG, MAX_TOKENS, MIN_TOKENS, long_prompt
from batching.backend.self_check.probe import COARSE_TOLERANCE, Probe
from batching.backend.self_check.steps import probe_prompts
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.ranks.lockstep.consensus import ALONE, Consensus

# A token of a damaged model may have no finite logits; the others are served.
_SALTS: Final = range(8)


def check_model(
    model: nn.Module,
    vocab_size: int,
    platform: Platform,
    changes: Changes,
    *,
    known: CheckResult | None = None,
    max_model_len: int = MAX_TOKENS,
    consensus: Consensus = ALONE,
    slices: LoadSlices = ONE_SLICE,
) -> CheckedModel:
    """Return the fastest mode of serving a model that gives the right logits, hooked into the model.

    Steps over the paged pool are compared with plain forward passes of mlx-lm: prompts of different
    lengths are prefilled in chunks, mixed with decodes, over scattered blocks, with a cached prefix and
    wrong drafts, and the logits of every token must be equal up to rounding.  Meanwhile windows and
    similar sizes of the model are reduced, so that these short prompts exceed them, and positions that
    have left a window are NaN.  On a GPU, steps over a long context follow, with all sizes as they are.

    platform: its accelerated forms are used if the same steps are right on them.
    changes: gets all changes to the model.
    known: the result of an earlier check of the same model; nothing is compared then.
    max_model_len: bounds the long context, in tokens.
    consensus: with other ranks, which check their parts of the model in the same steps.
    slices: is called between two steps.
    """
    platform.hook(model, changes)
    hook_attention(model, changes)
    hook_ranges(model, changes)
    join_rows(model, changes)
    prompts = probe_prompts(vocab_size)
    served = platform.serving(model)
    probe = Probe(model, vocab_size, served, changes, prompts, consensus=consensus, slices=slices)
    try:
        Observation(model, [0, 1]).layout()
    except Exception as error:
        probe.raise_unless_alone()
        # Its caches must be of the very class that it makes, perhaps.
        return probe.own_caches(f"its caches cannot be watched ({error})")
    if known is not None:
        return replace(probe, observed=Observation(model, prompts[0])).known(known)
    return _checked(probe, min(MAX_TOKENS, max_model_len))


def _checked(probe: Probe, max_tokens: int) -> CheckedModel:
    model = probe.model
    probe.slices.pause()
    sizes = _shrunk_sizes(probe)
    probe.slices.pause()
    tries = [probe_prompts(probe.vocab_size, salt) for salt in _SALTS]
    prompts, expected = _plain_logits(probe, tries)
    observed = Observation(model, prompts[0])
    probe = replace(probe, prompts=prompts, expected=expected, observed=observed)
    checked, changes = probe.fastest()
    has_real_sizes = not sizes.undo()
    if probe.platform.checks_long_context and checked.mode is not ExecutionMode.OWN:
        changes.undo()
        probe = replace(probe, platform=checked.platform)
        return _over_long_context(probe, checked.result, max_tokens)
    probe.changes.take(changes)
    if has_real_sizes:
        return checked
    real = replace(probe, observed=Observation(model, prompts[0]))
    return replace(checked, layout=real.layout(checked.result))


def _over_long_context(probe: Probe, result: CheckResult, num_tokens: int) -> CheckedModel:
    """Return the fastest mode, from one that is right over a short context on, that is right over a long one."""
    probe = replace(probe, observed=Observation(probe.model, probe.prompts[0]))
    if num_tokens < MIN_TOKENS:
        return probe.known(result)
    tries = [[long_prompt(probe.vocab_size, num_tokens, salt)] for salt in _SALTS]
    prompts, expected = _plain_logits(probe, tries)
    if not expected:
        return probe.known(result)
    long = replace(probe, prompts=2 * prompts, expected=2 * expected, script=LONG)
    checked, changes = long.fastest(result)
    probe.changes.take(changes)
    return checked


def _shrunk_sizes(probe: Probe) -> Changes:
    """Shrink windows and the like, unless the model then contradicts itself."""
    model, changes = probe.model, Changes()
    if shrink_sizes(model, changes):
        prompt = probe_prompts(probe.vocab_size)[0]
        try:
            with in_slices(model, probe.slices):
                whole, pieces = (
                    plain_logits(model, [prompt]),
                    plain_logits(model, [prompt[:20], prompt[20:]]),
                )
            is_same = float(mx.abs(whole - pieces).max() / mx.abs(whole).max()) < COARSE_TOLERANCE
        except Exception:
            probe.raise_unless_alone()
            is_same = False
        if not probe.consensus.choose(is_same, all):
            changes.undo()
    return changes


def _plain_logits(
    probe: Probe, tries: Sequence[list[list[int]]]
) -> tuple[list[list[int]], list[mx.array]]:
    """Return the first prompts that give finite logits, with these, `[L, vocab_size]` of each; else the last, and none."""
    for prompts in tries:
        logits: list[mx.array] = []
        for prompt in prompts:
            with in_slices(probe.model, probe.slices):
                logits.append(plain_logits(probe.model, [prompt]))
            mx.eval(logits)
            probe.slices.pause()
        are_finite = all(bool(mx.isfinite(rows).all()) for rows in logits)
        if probe.consensus.choose(are_finite, all):
            return prompts, logits
    return prompts, []
