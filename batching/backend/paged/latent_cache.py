"""Latent attention (MLA, DeepSeek-V2 2024): one latent and one rotated key a token, shared by all heads.

mlx-lm's models, for rows of length 1, compute the scores of the rotated parts themselves and hand them to
attention as a mask.  Here that product is put off: attention is over both parts together, and its
values are the latents.  A chunk of 8 tokens after 2,048 takes an eighth of what it takes with keys and
values made from the latents, one of 256 as much (kernels/docs/notebook.md).
"""

from abc import abstractmethod
from typing import Any

import mlx.core as mx

from batching.backend.paged.gathered_cache import GatheredLayerCache
from batching.backend.paged.kv_cache import LayerCache
from batching.backend.paged.pieces import DeferredMask, Piece


class RotatedKeys(mx.array):
    """The rotated keys of a step; a product with them is put off."""

    def swapaxes(self, *_: int) -> "TransposedKeys":  # type: ignore[override]
        return TransposedKeys(self)


class TransposedKeys(mx.array):
    def __rmatmul__(self, queries: mx.array) -> "PendingScores":  # type: ignore[misc]
        return PendingScores(queries)


class PendingScores:
    """Rotated queries, already scaled, `[T, num_heads, 1, dim]`; what is `mask` here."""

    def __init__(self, queries: mx.array) -> None:
        self.queries = queries

    @property
    def dtype(self) -> mx.Dtype:
        return self.queries.dtype


class Latents(mx.array):
    """The latents of a step, which know the layer whose pool has all those before them."""

    layer: "LatentCache"


class LatentCache(LayerCache):
    """Latents and rotated keys side by side, as a key of one head."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take latents and rotated keys, `[T, 1, 1, dim]` each."""
        self.write(mx.concatenate([keys, values], axis=-1), keys)
        latents = Latents(keys)
        latents.layer = self
        return latents, RotatedKeys(values)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Return no mask, even if an array is wanted: the model would put it into the scores."""
        return (
            None if window_size is None else super().make_mask(num_tokens, window_size=window_size)
        )

    def attend_latents(self, queries: mx.array, scores: PendingScores, scale: float) -> mx.array:
        """Attend with queries in the space of the latents, `[T, num_heads, 1, latent_dim]` in and out."""
        both = mx.concatenate([queries * scale, scores.queries], axis=-1)
        return self.attend_both(both)

    @abstractmethod
    def attend_both(self, queries: mx.array) -> mx.array:
        """Attend with scaled queries of latents and of rotated keys, side by side."""


class LatentLayerCache(LatentCache, GatheredLayerCache):
    """A pool in MLX arrays, `[num_slots, 1, latent_dim + rotated_dim]`."""

    _rows: mx.array

    def write(self, keys: mx.array, values: mx.array) -> None:
        self._rows = keys

    def attend_both(self, queries: mx.array) -> mx.array:
        outputs = [self._attend(piece, queries) for piece in self.step.pieces]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend(self, piece: Piece, queries: mx.array) -> mx.array:
        rows = slice(piece.first_row, piece.stop_row)
        added, taken = self._rows[rows], queries[rows]
        if piece.is_chunk:
            added, taken = added.swapaxes(0, 2), taken.swapaxes(0, 2)
        keys, _ = self.piece(piece).update_and_fetch(added, added[..., :0])
        mask = DeferredMask(None, is_array=False).of(piece)
        output = mx.fast.scaled_dot_product_attention(
            taken, keys, keys[..., : self.shape.latent_dim], scale=1.0, mask=mask
        )
        return output.swapaxes(0, 2) if piece.is_chunk else output
