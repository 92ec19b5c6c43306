"""The texts of a step as rows of one array, and attention within each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import mlx.core as mx
import numpy as np

# The scores of so many tokens of a long text are in memory at a time.
_MAX_QUERIES: Final = 512


@dataclass(frozen=True)
class Group:
    """Texts of one length, side by side; `first` is the first of their rows."""

    first: int
    num_texts: int
    length: int

    @property
    def stop(self) -> int:
        return self.first + self.num_texts * self.length


@dataclass(frozen=True)
class Texts:
    """The T tokens of a step, text after text.

    tokens: int32 `[T]`.
    types: int32 `[T]`, 1 for the second text of a pair, else 0.
    groups: texts of equal lengths are neighbours.
    """

    tokens: mx.array
    types: mx.array
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], seconds: Sequence[int | None]) -> "Texts":
        """Make the rows of texts, which ascend in length.

        seconds: where the second text of a pair begins; None without one.
        """
        groups: list[Group] = []
        first = 0
        for length, alike in groupby(map(len, texts)):
            groups.append(Group(first, sum(1 for _ in alike), length))
            first = groups[-1].stop
        types = [
            np.arange(len(text)) >= (len(text) if second is None else second)
            for text, second in zip(texts, seconds, strict=True)
        ]
        tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
        return cls(
            mx.array(tokens), mx.array(np.concatenate(types).astype(np.int32)), tuple(groups)
        )

    @property
    def firsts(self) -> list[int]:
        """The first row of each text."""
        return [
            group.first + i * group.length for group in self.groups for i in range(group.num_texts)
        ]

    def positions(self, padding_id: int | None = None) -> mx.array:
        """Return the position of each row in its text, int32 `[T]`.

        padding_id: as in RoBERTa, positions begin behind this number, and tokens with this id count for nothing.
        """
        ranges = [np.tile(np.arange(g.length), g.num_texts) for g in self.groups]
        positions = np.concatenate(ranges)
        if padding_id is None:
            return mx.array(positions.astype(np.int32))
        counts = np.array(self.tokens) != padding_id
        before = np.cumsum(counts)
        starts = np.concatenate([[0], before])[np.arange(len(counts)) - positions]
        return mx.array((np.where(counts, before - starts, 0) + padding_id).astype(np.int32))


def attention(
    qkv: mx.array,
    texts: Texts,
    num_heads: int,
    *,
    theta: float | None = None,
    window: int | None = None,
) -> mx.array:
    """Return what each token gets of all tokens of its text, `[T, size]`.

    qkv: `[T, 3 * size]`, of queries, keys and values.
    theta: the base of rotations; None rotates nothing.
    window: how far a token sees to either side; None is the whole text.
    """
    head_dim = qkv.shape[1] // 3 // num_heads
    parts = [
        _attend(
            qkv[g.first : g.stop].reshape(g.num_texts, g.length, 3, num_heads, head_dim),
            theta,
            window,
        )
        for g in texts.groups
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend(qkv: mx.array, theta: float | None, window: int | None) -> mx.array:
    """qkv: `[texts, length, 3, heads, head_dim]`."""
    num_texts, length, _, num_heads, head_dim = qkv.shape
    queries, keys, values = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    if theta is not None:
        queries, keys = (_rotated(each, theta) for each in (queries, keys))
    reach = length if window is None else window
    seen = []
    for start in range(0, length, _MAX_QUERIES):
        stop = min(start + _MAX_QUERIES, length)
        first, last = max(0, start - reach), min(length, stop + reach)
        part = mx.fast.scaled_dot_product_attention(
            queries[:, :, start:stop],
            keys[:, :, first:last],
            values[:, :, first:last],
            scale=head_dim**-0.5,
            mask=_window_mask(range(start, stop), range(first, last), reach),
        )
        seen.append(part)
    all_seen = seen[0] if len(seen) == 1 else mx.concatenate(seen, axis=2)
    return all_seen.transpose(0, 2, 1, 3).reshape(num_texts * length, num_heads * head_dim)


def _rotated(x: mx.array, theta: float) -> mx.array:
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=theta, scale=1.0, offset=0)


def _window_mask(queries: range, keys: range, reach: int) -> mx.array | None:
    """Return which keys each query sees; None if it is all of them."""
    if max(queries.stop - 1 - keys.start, keys.stop - 1 - queries.start) <= reach:
        return None
    distances = (
        mx.arange(queries.start, queries.stop)[:, None] - mx.arange(keys.start, keys.stop)[None, :]
    )
    return mx.abs(distances) <= reach
