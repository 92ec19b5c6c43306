"""Watches one plain pass over a model: what it keeps, and which of its modules read that."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from batching.backend.hooks.attention import FUNCTION, attention
from batching.backend.hooks.undo import Changes, python_modules
from batching.backend.paged.layout import (
    CacheLayout,
    LayerLayout,
    LayerShape,
    OwnShape,
    Several,
    StateShape,
)
from batching.backend.paged.state_cache import arrays_of

KEYS_AND_VALUES = (KVCache, RotatingKVCache, ChunkedKVCache)


@dataclass
class LeafUse:
    """How the model used one cache.

    users: the modules whose code read or wrote it.
    is_attended: all that is known to read keys and values is the attention function.
    is_shared: it was called with them for another layer.
    is_latent: it was called for one token with keys that are the values, and scores of others.
    """

    users: list[nn.Module] = field(default_factory=list)
    is_attended: bool = False
    is_shared: bool = False
    is_latent: bool = False

    @property
    def is_pooled(self) -> bool:
        """True if the pool can do what reads it."""
        return self.is_attended or self.is_latent

    def add(self, user: nn.Module | None) -> None:
        if user is not None and all(user is not other for other in self.users):
            self.users.append(user)


class Observation:
    """A plain pass over a model on a prompt of several tokens, and one more token, watched."""

    def __init__(self, model: nn.Module, tokens: Sequence[int]) -> None:
        self._caches = make_prompt_cache(model)
        self._leaves = list(_leaves(self._caches))
        watch = _Watch(self._leaves)
        with watch.watching(model):
            mx.eval(model(mx.array([list(tokens)]), cache=self._caches))
            mx.eval(model(mx.array([list(tokens[:1])]), cache=self._caches))
        self._uses = {id(leaf): use for leaf, use in zip(self._leaves, watch.uses, strict=True)}
        self._own: Sequence[LayerLayout] = [None] * len(self._caches)
        if not all(map(_is_known, self._leaves)):
            self._own = own_layout(model, tokens).layers

    def to_regroup(self, *, gathers_all: bool = False) -> list[nn.Module]:
        """Return the modules that cannot take a step's rows as they are.

        gathers_all: no attention is trusted to read nothing but what it seems to read.
        """
        untrusted = [leaf for cache in self._caches for leaf in self._untrusted(cache)]
        of = self._leaves if gathers_all else untrusted
        users = (user for leaf in of for user in self._uses[id(leaf)].users)
        return list({id(user): user for user in users}.values())

    def _untrusted(self, cache: Any) -> list[Any]:
        """Return the parts of a layer's cache that the model's own code reads.

        If that is so of keys and values in one part, it is taken to be so in the others: an indexer
        chooses among the latents beside it, but not among those of a short prompt.
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
    if not _is_known(cache):
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
        return LayerShape(num_heads, key_dim + value_dim, 0, cache.keys.dtype, is_latent=True)
    return LayerShape(
        num_heads,
        key_dim,
        value_dim,
        cache.keys.dtype,
        cache.max_size if isinstance(cache, RotatingKVCache) else None,
        is_gathered=is_gathered,
        is_shared=use.is_shared and not is_gathered,
    )


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _leaves(cache.caches)
        elif cache is not None:
            yield cache


def _is_known(cache: Any) -> bool:
    return type(cache) in (*KEYS_AND_VALUES, ArraysCache) and not getattr(cache, "keep", 0)


class _Watch:
    """Caches that report who uses them, and an attention function that reports what it gets."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.uses = [LeafUse() for _ in leaves]
        self._leaves = leaves
        # What a cache has returned, and which cache; the arrays are kept, so that ids stay theirs.
        self._fetched: dict[int, int] = {}
        self._masks: set[int] = set()
        self._kept: list[Any] = []
        self._strange: set[int] = set()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        changes = Changes()
        for index, leaf in enumerate(self._leaves):
            kind = type(leaf)
            if not _is_known(leaf):
                methods = self._any_use(index, kind)
            elif isinstance(leaf, ArraysCache):
                methods = self._entries(index, kind)
            else:
                methods = self._keys_and_values(index, kind)
            changes.set_attribute(leaf, "__class__", type(kind.__name__, (kind,), methods))
        for module in python_modules(model):
            if vars(module).get(FUNCTION) in (base.scaled_dot_product_attention, attention):
                changes.set_attribute(module, FUNCTION, self._attention)
        try:
            yield
        finally:
            changes.undo()
        for index in self._strange:
            self.uses[index].is_attended = False

    def _any_use(self, index: int, kind: Any) -> dict[str, Any]:
        def get_attribute(cache: Any, name: str) -> Any:
            self.uses[index].add(_calling_module())
            return kind.__getattribute__(cache, name)

        return {"__getattribute__": get_attribute}

    def _entries(self, index: int, kind: Any) -> dict[str, Any]:
        def get(cache: Any, at: int) -> Any:
            self.uses[index].add(_calling_module())
            return kind.__getitem__(cache, at)

        def put(cache: Any, at: int, value: Any) -> None:
            self.uses[index].add(_calling_module())
            kind.__setitem__(cache, at, value)

        return {"__getitem__": get, "__setitem__": put}

    def _keys_and_values(self, index: int, kind: Any) -> dict[str, Any]:
        def update_and_fetch(cache: Any, keys: mx.array, values: mx.array) -> Any:
            self.uses[index].add(_calling_module())
            return self._remember(index, kind.update_and_fetch(cache, keys, values))

        def keys_and_values(cache: Any) -> Any:
            # mlx-lm's own `update_and_fetch` also returns what this returns.
            if not isinstance(sys._getframe(1).f_locals.get("self"), kind):
                self.uses[index].add(_calling_module())
                self.uses[index].is_shared = True
            return self._remember(index, kind.keys_and_values(cache))

        def make_mask(cache: Any, *args: Any, **kwargs: Any) -> Any:
            mask = kind.make_mask(cache, *args, **kwargs)
            self._masks.add(id(mask))
            self._kept.append(mask)
            return mask

        methods: dict[str, Callable[..., Any]] = {
            "update_and_fetch": update_and_fetch,
            "keys_and_values": keys_and_values,
        }
        if hasattr(kind, "make_mask"):
            methods["make_mask"] = make_mask
        return methods

    def _remember(self, index: int, fetched: tuple[mx.array, mx.array]) -> Any:
        for array in fetched:
            self._fetched[id(array)] = index
            self._kept.append(array)
        return fetched

    def _attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        index = self._fetched.get(id(keys))
        if index is not None and keys is values and queries.shape[2] == 1:
            self.uses[index].is_latent = isinstance(mask, mx.array)
        elif index is not None and index == self._fetched.get(id(values)):
            if mask is None or isinstance(mask, str) or id(mask) in self._masks:
                self.uses[index].is_attended = True
            else:
                self._strange.add(index)
            self.uses[index].is_shared |= cache is not self._leaves[index]
        return base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )


def _calling_module() -> nn.Module | None:
    """Return the module whose code uses a cache: the nearest one on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        # Not isinstance: it would ask a cache for its class, and that is watched.
        owner = frame.f_locals.get("self")
        if issubclass(type(owner), nn.Module):
            return cast(nn.Module, owner)
        frame = frame.f_back  # type: ignore[assignment]
    return None
