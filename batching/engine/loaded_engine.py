"""An engine together with the description of its model."""

from collections.abc import Callable
from dataclasses import dataclass

from batching.batch_inference import BatchInferenceEngine
from batching.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What an engine thread builds when it starts.

    startup_lines: what was chosen, for the operator: device, dtype, BLAS, blocks, memory.
    release: gives memory back to the system once nothing refers to the engine any more.
    """

    engine: BatchInferenceEngine
    model: ModelInfo
    startup_lines: tuple[str, ...] = ()
    release: Callable[[], None] = lambda: None
