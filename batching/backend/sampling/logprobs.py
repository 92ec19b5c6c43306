"""Log probabilities of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.backend.sampling.host_draw import largest
from batching.steps.token_output import TokenLogprobs


def token_logprobs(
    logits: npt.NDArray[Any], token_ids: Sequence[int], tops: Sequence[int | tuple[int, ...]]
) -> list[TokenLogprobs]:
    """Return the log probability of a token in each row of `[R, vocab_size]`, float32.

    tops: how many of a row's most probable tokens come with it, of equal ones the smaller ids; or
        which tokens, beside itself.

    Raises:
        FloatingPointError: the logits are not finite.
    """
    return [_of(*row) for row in zip(logits, token_ids, tops, strict=True)]


def _of(logits: npt.NDArray[Any], token_id: int, top: int | tuple[int, ...]) -> TokenLogprobs:
    highest = logits.max()
    if not np.isfinite(highest):
        raise FloatingPointError("the model's logits are not finite")
    total = highest + np.log(np.exp(logits - highest).sum(dtype=np.float64))
    chosen = _top(logits, token_id, top)
    return TokenLogprobs(
        float(logits[token_id] - total),
        tuple(zip(chosen.tolist(), (logits[chosen] - total).tolist(), strict=True)),
    )


def _top(logits: npt.NDArray[Any], token_id: int, top: int | tuple[int, ...]) -> npt.NDArray[Any]:
    if isinstance(top, tuple):
        return np.array(list(dict.fromkeys((token_id, *top))), np.int64)
    return largest(logits, top) if top else np.empty(0, np.int64)
