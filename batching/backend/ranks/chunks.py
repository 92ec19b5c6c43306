"""The check of prompts in chunks, each of which is added up by other messages between ranks.

Backends have delivered large messages of unlike sizes wrongly one after the other, and small ones rightly: then what
the self-check reads is right, and a longer prompt is not.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from typing import Final

import mlx.core as mx

from batching.backend.loader import LoadedModel
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.self_check.expert_flips import has_experts
from batching.backend.self_check.probe import COARSE_TOLERANCE, tolerance_of
from batching.backend.self_check.probe_sequence import ProbeSequence
from batching.block_manager import BlockTable
from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices
from batching.errors import ModelLoadError
from batching.ranks.lockstep.consensus import Consensus, first, largest

# Rows at the end, whose logits are compared.
_NUM_COMPARED: Final = 16
# A share of the largest logit.  What arrives wrongly leaves nothing as it was; rounding in 16 bits, and other experts that it
# leads to, change less.
_WRONG: Final = 0.3
NUM_CHUNKS: Final = 3
# Logits of a row that ranks compare.
_NUM_SAMPLES: Final = 64


def check_chunks(
    config: EngineConfig,
    loaded: LoadedModel,
    checked: CheckedModel,
    consensus: Consensus,
    slices: LoadSlices,
) -> None:
    """Check that a prompt in chunks, of the size that is set, gives the logits that it gives in one, on all ranks.

    slices: is called between two chunks.

    Raises:
        ModelLoadError: it does not.
    """
    context = config.scheduler_config(1, config.model_context(loaded.max_model_len)).max_model_len
    fitting = (context - _NUM_COMPARED) // NUM_CHUNKS
    chunk = min(config.prefill_chunk, config.max_num_batched_tokens, fitting)
    if chunk < 1:
        return
    # The last one is shorter.
    last = NUM_CHUNKS * chunk - chunk // 2
    num_tokens = last + _NUM_COMPARED
    num_blocks = -(-num_tokens // config.block_size)
    tables = [BlockTable(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(2)]
    windows = 0 if checked.layout.window is None else 2 * num_blocks
    cache = checked.cache(2 * num_blocks, config.block_size, num_window_blocks=windows)
    runner = MLXRunner(loaded.model, loaded.vocab_size, checked.selection, cache)
    tokens = [(7919 * (i + 1)) % loaded.vocab_size for i in range(num_tokens)]
    whole, chunked = (
        ProbeSequence(i, tokens, table, table, state_slot=i) for i, table in enumerate(tables)
    )
    expected = _last_logits(runner, whole, [last], slices)
    found = _last_logits(runner, chunked, [*range(chunk, last, chunk), last], slices)
    off = _off(expected, found, consensus)
    # Some rows have other experts.
    most = sorted(off)[_NUM_COMPARED // 2 if has_experts(loaded.model) else -1]
    tolerance = tolerance_of(checked.layout)
    if has_experts(loaded.model) or tolerance >= COARSE_TOLERANCE:
        tolerance = _WRONG
    if any(map(isnan, off)) or most > tolerance:
        raise ModelLoadError(
            f"a prompt in chunks of {chunk} tokens has other logits than in one, or on another rank, by "
            f"{most:.2g} of the largest: what the ranks add up does not arrive as it was sent"
        )


def _last_logits(
    runner: MLXRunner, sequence: ProbeSequence, cuts: Sequence[int], slices: LoadSlices
) -> mx.array:
    """Read a sequence in slices that end at `cuts`; return the logits of the rows behind the last one."""
    num_tokens = len(sequence.token_ids)
    reads = [sequence.sampled(*pair) for pair in pairwise((0, *cuts))]
    logits = mx.zeros(0)
    for read in (*reads, sequence.scored(cuts[-1], num_tokens)):
        step = runner.cache.begin([read.to_slice()])
        logits = runner.logits(step)
        runner.cache.flush()
        mx.eval(logits, runner.cache.arrays)
        slices.pause()
    return logits.astype(mx.float32)


def _off(expected: mx.array, found: mx.array, consensus: Consensus) -> list[float]:
    """Return how far the logits of each row are off at most, here or on another rank, as a share of the largest."""
    scale = mx.abs(expected).max()
    some = found[:, :: max(1, found.shape[1] // _NUM_SAMPLES)]
    of_first = mx.array(consensus.choose(some.tolist(), first))
    differences = [mx.abs(found - expected).max(axis=-1), mx.abs(some - of_first).max(axis=-1)]
    off: list[list[float]] = (mx.stack(differences) / scale).tolist()  # type: ignore[assignment]
    return consensus.choose(largest(off), largest)
