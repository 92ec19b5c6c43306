"""Attention whose scores have a soft cap, `cap * tanh(score / cap)` (Gemma 2, 2024).

mlx-lm's attention function has none, so such models compute all of it themselves.
"""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.changes import Changes
from batching.backend.paged.kv_cache import LayerCache

_CAP: Final = "attn_logit_softcapping"
# Attributes that a module must have, and those that it may have; with any other, it could compute something else.
_NEEDED: Final = {"q_proj", "k_proj", "v_proj", "o_proj", "rope", "n_heads", "n_kv_heads", "scale"}
_OPTIONAL: Final = {"q_norm", "k_norm", "head_dim", "repeats"}


def soft_cap(module: nn.Module) -> float:
    """Return the cap if a module seems to compute nothing but attention with one; else 0."""
    attributes = {name for name in (*module, *vars(module)) if not name.startswith("_")}
    is_known = {*_NEEDED, _CAP} <= attributes <= {*_NEEDED, _CAP, *_OPTIONAL}
    return float(getattr(module, _CAP) or 0) if is_known else 0.0


def attend_capped(module: nn.Module, changes: Changes) -> None:
    """Let such a module attend over a pool that caps its scores."""
    plain = type(module)

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if not isinstance(cache, LayerCache) or not cache.shape.soft_cap:
            return plain.__call__(self, x, mask, cache)
        queries = self.q_proj(x).reshape(len(x), self.n_heads, 1, -1)
        keys, values = (
            project(x).reshape(len(x), self.n_kv_heads, 1, -1)
            for project in (self.k_proj, self.v_proj)
        )
        queries = self.q_norm(queries) if "q_norm" in self else queries
        keys = self.k_norm(keys) if "k_norm" in self else keys
        queries, keys = (self.rope(rows, offset=cache.offset) for rows in (queries, keys))
        cache.update_and_fetch(keys, values)
        output = cache.attend(queries, scale=self.scale, mask=mask, sinks=None)
        return self.o_proj(output.reshape(len(x), 1, -1))

    changes.override_call(module, call)
