"""Caches and an attention function that record how a model uses them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from batching.backend.hooks.attention import FUNCTION, attending_modules, attention
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.soft_cap import soft_cap

KEYS_AND_VALUES: Final = (KVCache, RotatingKVCache, ChunkedKVCache)


@dataclass
class LeafUse:
    """How a model used one cache.

    users: the modules whose code read or wrote it.
    is_attended: as far as observed, only the attention function reads its keys and values.
    is_shared: the attention of another layer was called with them.
    is_latent: attention was called for one token with keys that are also the values, and with scores
        from other keys.
    """

    users: list[nn.Module] = field(default_factory=list)
    is_attended: bool = False
    is_shared: bool = False
    is_latent: bool = False

    @property
    def is_pooled(self) -> bool:
        """True if the paged pool can provide what reads it."""
        return self.is_attended or self.is_latent or self.soft_cap > 0

    @property
    def soft_cap(self) -> float:
        """The soft cap of the only module that reads it with code of its own; 0 is no cap."""
        is_own = len(self.users) == 1 and not self.is_attended
        return soft_cap(self.users[0]) if is_own else 0.0

    def add(self, user: nn.Module | None) -> None:
        if user is not None and all(user is not other for other in self.users):
            self.users.append(user)


def is_known(cache: Any) -> bool:
    """Return whether what a cache keeps can be kept in the pool or in state slots."""
    return type(cache) in (*KEYS_AND_VALUES, ArraysCache) and not getattr(cache, "keep", 0)


class Watch:
    """Caches that record who uses them, and an attention function that records its arguments."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.uses = [LeafUse() for _ in leaves]
        self._leaves = leaves
        # Indices of the caches that returned arrays, by the arrays' ids; the arrays are kept, so that ids stay theirs.
        self._fetched: dict[int, int] = {}
        self._masks: set[int] = set()
        self._kept: list[Any] = []
        self._strange: set[int] = set()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        changes = Changes()
        for index, leaf in enumerate(self._leaves):
            kind = type(leaf)
            if not is_known(leaf):
                methods = self._any_use(index, kind)
            elif isinstance(leaf, ArraysCache):
                methods = self._entries(index, kind)
            else:
                methods = self._keys_and_values(index, kind)
            changes.set_attribute(leaf, "__class__", type(kind.__name__, (kind,), methods))
        for module in attending_modules(model):
            changes.rebind(model, module, FUNCTION, self._attention)
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
            if mask is None or isinstance(mask, str) or self._is_known_mask(mask, index):
                self.uses[index].is_attended = True
            else:
                self._strange.add(index)
            self.uses[index].is_shared |= cache is not self._leaves[index]
        return attention(queries, keys, values, cache, scale, mask, sinks)

    def _is_known_mask(self, mask: mx.array, index: int) -> bool:
        """Return whether a cache says what a mask hides: a chunked one makes none, but has a size."""
        return id(mask) in self._masks or isinstance(self._leaves[index], ChunkedKVCache)


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
