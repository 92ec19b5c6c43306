"""The halves of a model's layers as one operation on the pools of a cache."""

from typing import Any

import mlx.core as mx

from batching.backend.platforms.cpu.layers.rotary import RoPE
from batching.backend.platforms.cpu.pools.cache import NativeLayerCache
from batching.backend.platforms.cpu.pools.states import NativeStates


class Stacking:
    """Collects halves, in order, and what each step gives them.

    Layers with the same blocks have one step, and those that rotate alike the same angles.
    """

    def __init__(self, kernels: Any) -> None:
        self.stack = kernels.Stack()
        self._kernels = kernels
        # The first layer of each kind.
        self._layers: list[NativeLayerCache] = []
        self._ropes: list[RoPE] = []
        self._states: NativeStates | None = None
        self._state_pool: object | None = None

    def use(self, cache: NativeLayerCache, rope: RoPE | None) -> tuple[int, int]:
        """Return which step and which angles, -1 for none, an attention has."""
        kinds = [layer.is_windowed for layer in self._layers]
        if cache.is_windowed not in kinds:
            self._layers.append(cache)
            kinds.append(cache.is_windowed)
        return kinds.index(cache.is_windowed), -1 if rope is None else self._rotation(rope)

    def _rotation(self, rope: RoPE) -> int:
        for index, other in enumerate(self._ropes):
            if other.rotates_as(rope):
                return index
        self._ropes.append(rope)
        return len(self._ropes) - 1

    def state_pool(self, cache: NativeStates) -> object:
        """Return the pool of a layer that has run before."""
        if self._states is None:
            self._states, self._state_pool = cache, cache.pool
        return cache.pool

    @property
    def has_pools(self) -> bool:
        """Whether the pools are still those of the cache."""
        return self._states is None or self._states.pool is self._state_pool

    def run(self, x: mx.array) -> mx.array:
        rotations = [
            (*rope.angles(self._layers[0].offset), rope.is_traditional) for rope in self._ropes
        ]
        steps = [layer.native_step() for layer in self._layers]
        states = None if self._states is None else self._states.native_step()
        output: mx.array = self._kernels.run_stack(x, self.stack, steps, rotations, states)
        for cache in (*self._layers[:1], self._states):
            if cache is not None:
                cache.wrote(output)
        return output
