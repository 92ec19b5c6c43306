"""From what a model keeps to the caches that it gets."""

from collections.abc import Callable, Sequence

from batching.backend.paged.gathered_cache import GatheredLayerCache
from batching.backend.paged.kv_cache import CacheTuple, LayerCache, ModelCache, cache_leaves
from batching.backend.paged.latent_cache import LatentLayerCache
from batching.backend.paged.layout import (
    CacheLayout,
    LayerLayout,
    LayerShape,
    OwnShape,
    Several,
    StateShape,
)
from batching.backend.paged.state_cache import OwnCaches, RecurrentStates


def make_caches(
    layers: Sequence[LayerLayout],
    make: Callable[[LayerShape, int], LayerCache],
    num_blocks: int,
    block_size: int,
    num_window_blocks: int,
    make_states: Callable[[int], RecurrentStates] = RecurrentStates,
) -> list[ModelCache]:
    """Return a cache for each layer; `make` returns one of so many blocks, with the pool's attention.

    num_window_blocks: of layers with a window; 0 is no blocks of their own.
    make_states: returns one for states of so many arrays.
    """
    num_slots = num_blocks * block_size

    def cache(layer: LayerLayout) -> ModelCache:
        match layer:
            case None:
                return None
            case Several():
                return CacheTuple(map(cache, layer.parts))
            case StateShape():
                return make_states(layer.num_arrays)
            case OwnShape():
                return OwnCaches(layer.empty)
            case LayerShape(is_latent=True):
                return LatentLayerCache(layer, num_slots, block_size)
            case LayerShape(is_gathered=True):
                return GatheredLayerCache(layer, num_slots, block_size)
        return _pooled(layer, make, num_blocks, num_window_blocks)

    caches = [cache(layer) for layer in layers]
    defers = any(shape.is_gathered for shape in CacheLayout(tuple(layers)).shapes)
    for leaf in cache_leaves(caches):
        if isinstance(leaf, LayerCache):
            leaf.defers_masks = defers
    return caches


def _pooled(
    shape: LayerShape,
    make: Callable[[LayerShape, int], LayerCache],
    num_blocks: int,
    num_window_blocks: int,
) -> LayerCache:
    is_windowed = bool(num_window_blocks) and shape.is_windowed
    layer = make(shape, num_window_blocks if is_windowed else num_blocks)
    layer.is_windowed = is_windowed
    return layer
