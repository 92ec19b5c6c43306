"""Observes one plain forward pass: what each layer of a model keeps, and which modules read it."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from batching.backend.hooks.watch import KEYS_AND_VALUES, LeafUse, Watch, is_known
from batching.backend.paged.layout import (
    CacheLayout,
    LayerLayout,
    LayerShape,
    OwnShape,
    Several,
    StateShape,
)
from batching.backend.paged.state_cache import arrays_of


class Observation:
    """The observation of a plain forward pass on a prompt of several tokens, and of one more token."""

    def __init__(self, model: nn.Module, tokens: Sequence[int]) -> None:
        self._caches = make_prompt_cache(model)
        self._leaves = list(_leaves(self._caches))
        watch = Watch(self._leaves)
        with watch.watching(model):
            mx.eval(model(mx.array([list(tokens)]), cache=self._caches))
            mx.eval(model(mx.array([list(tokens[:1])]), cache=self._caches))
        self._uses = {id(leaf): use for leaf, use in zip(self._leaves, watch.uses, strict=True)}
        self._own: Sequence[LayerLayout] = [None] * len(self._caches)
        if not all(map(is_known, self._leaves)):
            self._own = own_layout(model, tokens).layers

    def to_regroup(self, *, gathers_all: bool = False) -> list[nn.Module]:
        """Return the modules that cannot process the ragged rows of a step.

        gathers_all: include all modules with attention, in case they read more of the cache than was
            observed.
        """
        untrusted = [leaf for cache in self._caches for leaf in self._untrusted(cache)]
        of = self._leaves if gathers_all else untrusted
        users = (user for leaf in of for user in self._uses[id(leaf)].users)
        return list({id(user): user for user in users}.values())

    def to_cap(self) -> list[nn.Module]:
        """Return the modules whose attention the pool can compute with their soft caps."""
        return [use.users[0] for use in self._uses.values() if use.soft_cap]

    def _untrusted(self, cache: Any) -> list[Any]:
        """Return the parts of a layer's cache that the model's own code reads.

        If that is true of the keys and values of one part, it is assumed of the other parts: an indexer
        chooses among the latents of the other part, but does not do so in a short prompt.
        """
        leaves = list(_leaves([cache]))
        uses = [self._uses[id(leaf)] for leaf in leaves]
        own = [leaf for leaf, use in zip(leaves, uses, strict=True) if not use.is_pooled]
        if any(isinstance(leaf, KEYS_AND_VALUES) for leaf in own):
            return leaves
        return own

    def layout(self, *, gathers_all: bool = False) -> CacheLayout:
        regrouped = {id(module) for module in self.to_regroup(gathers_all=gathers_all)}
        pairs = zip(self._caches, self._own, strict=True)
        return CacheLayout(tuple(_layout(c, own, self._uses, regrouped) for c, own in pairs))


def own_layout(model: nn.Module, tokens: Sequence[int]) -> CacheLayout:
    """Return a layout in which each request has cache objects of the model's own, of any kind."""
    empty, few, many = (make_prompt_cache(model) for _ in range(3))
    counts = (len(tokens) // 2, len(tokens))
    for caches, count in zip((few, many), counts, strict=True):
        mx.eval(model(mx.array([list(tokens[:count])]), cache=caches))

    def layout(empty: Any, few: Any, many: Any) -> OwnShape | Several:
        if type(empty) is CacheList:
            parts = zip(empty.caches, few.caches, many.caches, strict=True)
            return Several(tuple(layout(*part) for part in parts))
        sizes = [sum(a.nbytes for a in arrays_of(_contents(cache))) for cache in (few, many)]
        growth = max(0, sizes[1] - sizes[0]) // (counts[1] - counts[0])
        return OwnShape(empty, max(0, sizes[1] - growth * counts[1]), growth)

    return CacheLayout(tuple(map(layout, empty, few, many)))


def _contents(cache: Any) -> Any:
    """Return what a cache holds; mlx-lm's keep more room than that."""
    return cache.state if hasattr(cache, "state") else vars(cache)


def _layout(
    cache: Any, own: LayerLayout, uses: dict[int, LeafUse], regrouped: set[int]
) -> LayerLayout:
    if cache is None:
        return None
    if type(cache) is CacheList:
        own_parts = own.parts if isinstance(own, Several) else [None] * len(cache.caches)
        parts = zip(cache.caches, own_parts, strict=True)
        return Several(tuple(_layout(c, o, uses, regrouped) for c, o in parts))
    if not is_known(cache):
        assert isinstance(own, OwnShape)
        return own
    if isinstance(cache, ArraysCache):
        entries: list[Any] = cache.cache
        return StateShape(len(entries), sum(a.nbytes for a in entries if a is not None))
    return _layer_shape(cache, uses[id(cache)], regrouped)


def _layer_shape(cache: Any, use: LeafUse, regrouped: set[int]) -> LayerShape | None:
    if cache.keys is None:
        # There are more caches than layers.
        return None
    _, num_heads, _, key_dim = cache.keys.shape
    value_dim = cache.values.shape[-1]
    is_gathered = any(id(user) in regrouped for user in use.users)
    if use.is_latent and not is_gathered:
        dtype = cache.keys.dtype
        return LayerShape(num_heads, key_dim + value_dim, 0, dtype, latent_dim=key_dim)
    return LayerShape(
        num_heads,
        key_dim,
        value_dim,
        cache.keys.dtype,
        _window(cache),
        is_gathered=is_gathered,
        is_shared=use.is_shared and not is_gathered,
        soft_cap=0.0 if is_gathered else use.soft_cap,
        is_chunked=isinstance(cache, ChunkedKVCache),
    )


def _window(cache: Any) -> int | None:
    if isinstance(cache, RotatingKVCache):
        return int(cache.max_size)
    return int(cache.chunk_size) if isinstance(cache, ChunkedKVCache) else None


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _leaves(cache.caches)
        elif cache is not None:
            yield cache
