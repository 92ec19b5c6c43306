"""Log probabilities of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.backend.sampling.host_draw import largest
from batching.request import TokenLogprobs


def token_logprobs(
    logits: npt.NDArray[Any], token_ids: Sequence[int], nums_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log probability of a token in each row of `[R, vocab_size]`, float32.

    nums_top: how many of a row's most probable tokens come with it; of equal ones the
        smaller ids.

    Raises:
        FloatingPointError: the logits are not finite.
    """
    return [_of(*row) for row in zip(logits, token_ids, nums_top, strict=True)]


def _of(logits: npt.NDArray[Any], token_id: int, num_top: int) -> TokenLogprobs:
    highest = logits.max()
    if not np.isfinite(highest):
        raise FloatingPointError("the model's logits are not finite")
    total = highest + np.log(np.exp(logits - highest).sum(dtype=np.float64))
    top = largest(logits, num_top) if num_top else np.empty(0, np.int64)
    return TokenLogprobs(
        float(logits[token_id] - total),
        tuple(zip(top.tolist(), (logits[top] - total).tolist(), strict=True)),
    )
