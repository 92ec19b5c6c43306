"""The paged KV pool, and the cache objects that the layers of an mlx-lm model get.

There are three kinds of pool: of MLX's own operations (`batching.backend.paged.mlx_pool`), of the GPU kernels
(`batching.backend.platforms.gpu.kernel_pool`), and of the native CPU kernels
(`batching.backend.platforms.cpu.pools.cache`).  Layers whose keys and values the model's own code reads are
gathered into contiguous arrays (`batching.backend.paged.gathered_cache`) in each of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.adapters.adapter import NO_SLOT
from batching.backend.memory.device import free_buffers
from batching.backend.paged.block_bytes import WrongBlock
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.paged.pieces import DeferredMask, KeepsAll, Piece, cut
from batching.backend.paged.state_cache import StateCache
from batching.backend.sampling.logit_rows import LogitRows
from batching.block_manager import BlockCopy
from batching.block_store.entry_file import Buffer
from batching.steps.step_plan import Slice, StateCopy

Slots = npt.NDArray[np.int64]
# Returns the positions of the rows of slices for rotations, int32 `[T]`; None are those in their requests.
PositionsOf = Callable[[Sequence[Slice]], mx.array | None]


class RowAttention(Protocol):
    """The attention inputs of one step, as a kind of pool needs them; `slices` is the order of the rows."""

    @property
    def slices(self) -> Sequence[Slice]: ...

    def windowed(self) -> "RowAttention":
        """Return the inputs for sliding-window layers with a pool of their own, in the same order."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """One step as arrays: its T tokens are a batch of T rows of length 1.

    tokens: int32 `[T, 1]`.
    positions: int32 `[T]`, by which rows are rotated: the position of each in its request, unless the request
        has images that are rotated otherwise.
    slots: int64 `[T]`, the slot in the pool of each token, in host memory; see also `slot_rows`.
    logit_rows: the rows whose logits are needed.
    attention: the order of the rows, and how they attend.
    one_by_one: modules that do not take ragged rows get one request at a time.
    """

    tokens: mx.array
    positions: mx.array
    slots: npt.NDArray[np.int64]
    logit_rows: LogitRows
    attention: RowAttention
    one_by_one: bool = False

    def slot_rows(self, num_heads: int, num_slots: int) -> mx.array:
        """Return the rows of a `[num_heads * num_slots, dim]` array that hold the step's tokens.

        uint32 `[T * num_heads]`, all heads of a token next to each other.  It is made once and shared by all
        layers of this shape.
        """
        key = (num_heads, num_slots)
        if key not in self._slot_rows:
            self._slot_rows[key] = slot_rows(self.slots, num_heads, num_slots)
        return self._slot_rows[key]

    @cached_property
    def _slot_rows(self) -> dict[tuple[int, int], mx.array]:
        return {}

    @cached_property
    def pieces(self) -> list[Piece]:
        return cut(self.attention.slices, one_by_one=self.one_by_one)

    @classmethod
    def of(
        cls,
        attention: RowAttention,
        block_size: int,
        *,
        one_by_one: bool = False,
        positions: mx.array | None = None,
    ) -> "StepInputs":
        """Return the inputs of a step; `positions` are those for rotations, None the rows' own."""
        tokens: list[int] = []
        own: list[int] = []
        for s in attention.slices:
            tokens += s.token_ids
            own += range(s.start, s.stop)
        return cls(
            tokens=mx.array(tokens, dtype=mx.int32)[:, None],
            positions=mx.array(own, dtype=mx.int32) if positions is None else positions,
            slots=_slots(attention.slices, block_size),
            logit_rows=LogitRows.of(attention.slices),
            attention=attention,
            one_by_one=one_by_one,
        )

    def windowed(self, block_size: int) -> "StepInputs":
        """Return the same rows for sliding-window layers with a pool of their own."""
        slots = _slots(self.attention.slices, block_size, is_windowed=True)
        return replace(self, slots=slots, attention=self.attention.windowed())


def slot_rows(slots: Slots, num_heads: int, num_slots: int) -> mx.array:
    """Return where slots are in an array of shape `[num_heads * num_slots, dim]`.

    uint32 `[len(slots) * num_heads]`, all heads of a slot next to each other.
    """
    rows = slots[:, None] + np.arange(num_heads) * num_slots
    return mx.array(rows.ravel().astype(np.uint32))


def _slots(slices: Sequence[Slice], block_size: int, *, is_windowed: bool = False) -> Slots:
    slots: list[int] = []
    # Most slices are of one token, for which numpy would take longer.
    for s in slices:
        block_ids = s.table(is_windowed=is_windowed).block_ids
        slots += (
            block_ids[at // block_size] * block_size + at % block_size
            for at in range(s.start, s.stop)
        )
    return np.array(slots, np.int64)


class SharedKeys(mx.array):
    """The keys or values of a step, together with the layer whose pool has all those before them.

    It is returned to models whose layers read the keys of other layers (Gemma 3n and 4, AFM).
    """

    layer: "LayerCache"

    @classmethod
    def of(cls, rows: mx.array, layer: "LayerCache") -> "SharedKeys":
        shared = cls(rows)
        shared.layer = layer
        return shared

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape with the number of keys that each row attends to; models derive positions from it."""
        batch, heads, _, dim = super().shape
        return batch, heads, self.layer.offset + 1, dim


class LayerCache(KeepsAll, ABC):
    """One layer's part of the pool, with the interface of an mlx-lm cache.

    `update_and_fetch` writes the new keys and values into their slots; `attend` reads them through the
    block tables.  What `make_mask` returns is opaque to the model, which passes it on to attention.
    """

    # Some modules of the model take pieces, and need masks for these.
    defers_masks = False
    # It shares its blocks with other layers that have windows, and not with those that have none.
    is_windowed = False
    # Steps may be queued one behind the other: it writes in their order, and nothing is copied for that.
    takes_queued_steps = False

    def __init__(self, shape: LayerShape, num_slots: int) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self._window = SlidingWindow(shape.window, shape.is_chunked) if shape.window else None
        self._step: StepInputs | None = None
        self._shared: tuple[SharedKeys, SharedKeys] | None = None
        self.reset()

    def begin(self, step: StepInputs) -> None:
        self._step = step
        self._shared = None

    @property
    def step(self) -> StepInputs:
        assert self._step is not None, "a step begins before the model runs"
        return self._step

    # Interface to mlx-lm's models

    @property
    def offset(self) -> mx.array:
        """The position of each row, int32 `[P]`."""
        return self.step.positions

    @property
    def start_position(self) -> mx.array:
        """The position of the first key that a model makes a mask for: each row's own."""
        return self.offset

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The arrays that are written lazily, to be evaluated with every step."""
        return ()

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> SlidingWindow | DeferredMask | None:
        window = SlidingWindow(window_size) if window_size else self._window
        if self.defers_masks:
            return DeferredMask(window.size if window else None, return_array)
        return window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys and values, `[T, num_heads, 1, dim]`; attention reads the pool, not the return value."""
        self.write(keys, values)
        if self.shape.is_shared:
            self._shared = SharedKeys.of(keys, self), SharedKeys.of(values, self)
            return self._shared
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return to another layer what `update_and_fetch` returned in this step."""
        assert self._shared is not None, "a layer writes before others read"
        return self._shared

    @abstractmethod
    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write the step's rows, `[T, num_heads, 1, dim]`, at the latest before they are read."""

    def attend(
        self, queries: mx.array, *, scale: float, mask: object, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention output of all rows; queries and output are `[T, num_query_heads, 1, head_dim]`.

        mask: what `make_mask` returned, or None.
        sinks: the layer's attention sinks; None if it has none.
        """
        return self.attend_within(queries, scale, self.window(mask), sinks)

    def window(self, mask: object) -> SlidingWindow | None:
        """Return the window that a model's mask stands for; None attends to all positions.

        Raises:
            TypeError: the mask was not made by `make_mask`.
        """
        if self.shape.is_chunked:
            # The model's own mask is of the rows alone; see `start_position`.
            mask = self._window
        elif isinstance(mask, DeferredMask):
            mask = SlidingWindow(mask.window) if mask.window else None
        if mask is not None and not isinstance(mask, SlidingWindow):
            raise TypeError(f"attention over the paged pool takes no mask of {type(mask)}")
        return self.visible(mask)

    def visible(self, window: SlidingWindow | None) -> SlidingWindow | None:
        """Return the window of a row, limited to the positions whose blocks are certain to exist.

        That is one position more than a cache of mlx-lm keeps, since a mask may show it (PLaMo 3).  It is
        limited also if the layers share the main pool, since the self-check runs with a pool of their own.
        """
        if self._window is None:
            return window
        return self._window if window is None else min(window, SlidingWindow(self._window.size + 1))

    @abstractmethod
    def attend_within(
        self,
        queries: mx.array,
        scale: float,
        window: SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array: ...

    # Interface to the cache of all layers

    @abstractmethod
    def flush(self) -> None:
        """Finish the writes of a step that are pending."""

    @abstractmethod
    def copy(self, sources: Slots, targets: Slots) -> None: ...

    @abstractmethod
    def export_block(self, slots: Slots) -> bytes:
        """Return the contents of a block, given by its slots; all steps that were begun have ended."""

    @abstractmethod
    def import_block(self, slots: Slots, data: Buffer) -> None:
        """Write what `export_block` has returned into a block, which no step may use meanwhile.

        Raises:
            WrongBlock: it is of another size.
        """

    @abstractmethod
    def reset(self) -> None:
        """Replace the arrays by empty ones."""


# Copies whole blocks, given by their slots, in each of some layers.
CopyLayers = Callable[[Sequence[LayerCache], Slots, Slots], None]


def copy_each(layers: Sequence[LayerCache], sources: Slots, targets: Slots) -> None:
    for layer in layers:
        layer.copy(sources, targets)


class CacheTuple(tuple["ModelCache", ...]):
    """The caches of a layer that needs several, in place of mlx-lm's CacheList."""


ModelCache = LayerCache | StateCache | CacheTuple | None


class PagedKVCache:
    """The pool of all layers: the only place where keys, values and recurrent states are stored.

    caches: the cache object for each layer of the model.
    layers: the caches among them that hold keys and values.
    """

    def __init__(
        self,
        caches: Sequence[ModelCache],
        block_size: int,
        attention: Callable[[Sequence[Slice], int], RowAttention],
        on_use: Sequence[Callable[[int], None]] = (),
        copy_layers: CopyLayers = copy_each,
        *,
        one_by_one: bool = False,
    ) -> None:
        """Make a pool of these layers.

        attention: makes the attention inputs of a step from its slices and the block size.
        on_use: called before a step with the highest block that it writes to: the first function for the
            main pool, the second one for the pool of sliding-window layers.
        copy_layers: copies blocks in layers, which may be one call for all of them.
        one_by_one: modules that do not take ragged rows get one request at a time.
        """
        self.caches = list(caches)
        leaves = list(cache_leaves(caches))
        self.layers = [leaf for leaf in leaves if isinstance(leaf, LayerCache)]
        self._states = [leaf for leaf in leaves if isinstance(leaf, StateCache)]
        self._has_windows = any(layer.is_windowed for layer in self.layers)
        self._block_size = block_size
        self._attention = attention
        self._on_use = on_use
        self._copy_layers = copy_layers
        self._one_by_one = one_by_one

    @property
    def takes_queued_steps(self) -> bool:
        """True if a step may begin before the arrays of the previous one are evaluated."""
        return not self._one_by_one and all(layer.takes_queued_steps for layer in self.layers)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that a step writes lazily, which must be evaluated with it."""
        written = [array for layer in self.layers for array in layer.state]
        return written + [array for state in self._states for array in state.written]

    def begin(
        self,
        slices: Sequence[Slice],
        gone: Collection[int] = (),
        positions: PositionsOf | None = None,
    ) -> StepInputs:
        """Set up the next forward pass and return its inputs.

        gone: the ids of sequences whose slots of recurrent states belong to others now, or to none.
        positions: returns positions for rotations, if they are not those of the rows in their requests.
        """
        if any(s.adapter_slot != NO_SLOT for s in slices):
            # Rows with the same adapter are multiplied together, and decodes are one piece.
            slices = sorted(slices, key=lambda s: (s.is_prefill, s.adapter_slot))
        attention = self._attention(slices, self._block_size)
        step = StepInputs.of(
            attention,
            self._block_size,
            one_by_one=self._one_by_one,
            positions=positions and positions(attention.slices),
        )
        inputs = [step, step.windowed(self._block_size)] if self._has_windows else [step]
        for on_use, each in zip(self._on_use, inputs, strict=False):
            on_use(int(each.slots.max()) // self._block_size)
        for layer in self.layers:
            layer.begin(inputs[layer.is_windowed])
        for state in self._states:
            state.begin(step, gone)
        return step

    def flush(self) -> None:
        """Finish a step, so that all it wrote is in the pool."""
        for layer in self.layers:
            layer.flush()
        for state in self._states:
            state.flush()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers of their pool."""
        for is_windowed in {c.is_windowed for c in copies}:
            within = np.arange(self._block_size)
            group = [c for c in copies if c.is_windowed == is_windowed]
            sources = np.concatenate([c.source * self._block_size + within for c in group])
            targets = np.concatenate([c.target * self._block_size + within for c in group])
            self._copy_layers(self._layers_with(is_windowed=is_windowed), sources, targets)

    def export_block(self, block_id: int, *, is_windowed: bool = False) -> list[bytes]:
        """Return the contents of a block in each of the layers that have it; all steps that were begun have ended.

        is_windowed: it is one of the pool of sliding-window layers.
        """
        slots = self._slots_of(block_id)
        return [layer.export_block(slots) for layer in self._layers_with(is_windowed=is_windowed)]

    def import_block(
        self, block_id: int, contents: Sequence[Buffer], *, is_windowed: bool = False
    ) -> None:
        """Write what `export_block` has returned into a block, which no step may use meanwhile.

        Raises:
            WrongBlock: it is of another pool, as its sizes show; what the block then has is not defined.
        """
        layers = self._layers_with(is_windowed=is_windowed)
        if len(contents) != len(layers):
            raise WrongBlock(f"a block is of {len(layers)} layers, not {len(contents)}")
        for layer, data in zip(layers, contents, strict=True):
            layer.import_block(self._slots_of(block_id), data)

    @property
    def can_be_stored(self) -> bool:
        """True if its states, like its blocks, can be exported."""
        return all(state.can_be_stored for state in self._states)

    def export_state(self, slot: int, position: int) -> list[bytes]:
        """Return a recurrent state in each of the layers that have it, after all steps that were begun."""
        return [state.export_state(slot, position) for state in self._states]

    def import_state(self, slots: Sequence[int], position: int, contents: Sequence[bytes]) -> None:
        """Put what `export_state` has returned into slots, which no step may use meanwhile.

        Raises:
            WrongBlock: it is of another form.
        """
        if len(contents) != len(self._states):
            raise WrongBlock(f"a state is of {len(self._states)} layers, not {len(contents)}")
        for state, data in zip(self._states, contents, strict=True):
            state.import_state(slots, position, data)

    def _slots_of(self, block_id: int) -> Slots:
        return block_id * self._block_size + np.arange(self._block_size)

    def _layers_with(self, *, is_windowed: bool) -> list[LayerCache]:
        """Return the layers of the pool of sliding-window layers, or of the main one."""
        return [layer for layer in self.layers if layer.is_windowed == is_windowed]

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        for state in self._states:
            for copy in copies:
                state.copy(copy)

    def reset(self) -> None:
        """Replace all arrays by empty ones, as after a step that raised."""
        for layer in self.layers:
            layer.reset()
        for state in self._states:
            state.reset()
        # The step's buffers are freed first; it may have failed for want of memory.
        free_buffers()
        mx.eval(self.arrays)


def cache_leaves(caches: Iterable[ModelCache]) -> Iterator[LayerCache | StateCache]:
    for cache in caches:
        if isinstance(cache, CacheTuple):
            yield from cache_leaves(cache)
        elif cache is not None:
            yield cache
