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

MakeCache = Callable[[LayerShape, int], LayerCache]


def make_caches(
    layers: Sequence[LayerLayout],
    make: MakeCache,
    num_blocks: int,
    block_size: int,
    num_window_blocks: int,
    make_latent: MakeCache | None = None,
    make_states: Callable[[int], RecurrentStates] = RecurrentStates,
) -> list[ModelCache]:
    """Return a cache for each layer; `make` returns one of so many blocks, with the pool's attention.

    num_window_blocks: of layers with a window; 0 is no blocks of their own.
    make_latent: returns one for latents; None gathers them.
    make_states: returns one for states of so many arrays.
    """
    sizes = (num_blocks, block_size, num_window_blocks)

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
        return _layer_cache(layer, make, make_latent, *sizes)

    caches = [cache(layer) for layer in layers]
    defers = any(shape.is_gathered for shape in CacheLayout(tuple(layers)).shapes)
    for leaf in cache_leaves(caches):
        if isinstance(leaf, LayerCache):
            leaf.defers_masks = defers
    return caches


def _layer_cache(
    shape: LayerShape,
    make: MakeCache,
    make_latent: MakeCache | None,
    num_blocks: int,
    block_size: int,
    num_window_blocks: int,
) -> LayerCache:
    if shape.is_latent and make_latent is not None:
        return make_latent(shape, num_blocks)
    if shape.is_latent:
        return LatentLayerCache(shape, num_blocks * block_size, block_size)
    if shape.is_gathered:
        return GatheredLayerCache(shape, num_blocks * block_size, block_size)
    is_windowed = bool(num_window_blocks) and shape.is_windowed
    layer = make(shape, num_window_blocks if is_windowed else num_blocks)
    layer.is_windowed = is_windowed
    return layer
