"""The sampler of the native kernels."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.backend.sampling.edits import Edits, ExpectedEdit
from batching.backend.sampling.sampler import Draw, Sampler, draw_on_host
from batching.inputs.sampling_params import SamplingParams

_Floats = npt.NDArray[np.float32]
_StoredExpected = tuple[int, float, float, _Floats, _Floats]
_StoredEdits = tuple[npt.NDArray[np.int32], _Floats, _Floats, _StoredExpected | None]


def native_sampler(kernels: Any) -> Sampler:
    def arg_max(logits: mx.array) -> tuple[mx.array, mx.array]:
        indices, largest = kernels.arg_max(logits.astype(mx.float32))
        return indices, largest

    return Sampler(native_draw(kernels), arg_max)


def native_draw(kernels: Any) -> Draw:
    """Return what samples a token for each row of logits, by all threads and without a copy of them.

    Rows that are not plain (`SamplingParams.is_plain`) are drawn with numpy.
    """

    def draw(
        logits: mx.array,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        edits: Sequence[Edits | None],
        before: mx.array | None = None,
    ) -> mx.array:
        vocab_size = logits.shape[-1]
        rows = [
            (p.temperature, min(p.top_k, vocab_size), p.top_p, p.min_p, p.top_n_sigma, seed)
            for p, seed in zip(params, seeds, strict=True)
        ]
        tokens: mx.array = kernels.sample(
            logits, rows, [e and _as_stored(e) for e in edits], before
        )
        others = [row for row, p in enumerate(params) if not p.is_plain and p.temperature > 0]
        if others:
            tokens[mx.array(others)] = draw_on_host(
                logits[mx.array(others)],
                [params[row] for row in others],
                [seeds[row] for row in others],
                [edits[row] for row in others],
                before,
            )
        return tokens

    return draw


def _as_stored(edits: Edits) -> _StoredEdits:
    tokens, factor, term, expected = edits
    return tokens.astype(np.int32), _floats(factor), _floats(term), expected and _stored(expected)


def _stored(expected: ExpectedEdit) -> _StoredExpected:
    row, factor, term, factors, terms = expected
    return row, factor, term, _floats(factors), _floats(terms)


def _floats(array: npt.NDArray[np.float64]) -> _Floats:
    return array.astype(np.float32)
