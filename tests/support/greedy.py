"""What a model says by itself, on the caches that mlx-lm makes for it."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache


def most_probable(
    model: nn.Module, prompt: Sequence[int], output: Sequence[int], vocab_size: int | None = None
) -> list[int]:
    """Return the token that is the most probable in the place of each one of an output.

    An output is what the model generates greedily if it is these tokens; that takes one pass instead of one for
    each token.
    """
    tokens = mx.array([[*prompt, *output[:-1]]])
    logits = model(tokens, cache=make_prompt_cache(model))[0, len(prompt) - 1 :, :vocab_size]
    return [int(token) for token in np.array(mx.argmax(logits, axis=-1))]
