"""An engine together with the description of its model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from batching.batch_inference import BatchInferenceEngine
from batching.block_store.store import BlockStore
from batching.engine.memory_use import NO_MEMORY, MemoryUse
from batching.kv_cache.cache_events import AllBlocksCleared, CacheEventSink
from batching.model_info.model import ModelInfo


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """The engine that a thread builds when it starts, and the model it runs.

    startup_lines: what was chosen, for the operator: device, dtype, BLAS, blocks, memory.
    memory: the bytes that it takes.
    close: gives everything back that was loaded; no step may be run afterwards.
    store: of its blocks, which `close` closes, too; None keeps none.
    """

    engine: BatchInferenceEngine
    model: ModelInfo
    startup_lines: tuple[str, ...] = ()
    memory: MemoryUse = NO_MEMORY
    close: Callable[[], None] = lambda: None
    store: BlockStore | None = None

    def reporting(self, sink: CacheEventSink) -> "LoadedEngine":
        """Return the same, which tells `sink` of shared blocks, and at its end that there are none.

        It begins with that, too, for those who know the blocks of a process that was killed.
        """
        self.engine.report_cache(sink)
        sink([AllBlocksCleared()])
        close = self.close

        def close_and_tell() -> None:
            sink([AllBlocksCleared()])
            close()

        return replace(self, close=close_and_tell)
