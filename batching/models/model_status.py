"""What an operator or a client sees of a model."""

from dataclasses import dataclass

from batching.engine.memory_use import MemoryUse
from batching.models.residency.model_state import ModelState
from batching.models.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model at one moment.

    progress: the share of a load that is done, in [0, 1]; 0 unless it is loading.
    reason: why the last load failed, for the operator; empty if it did not.
    num_requests, num_waiting: requests that use the model, and that wait for it.
    expires_in: seconds until it is unloaded if no request asks for it; None if it is in use, or never.
    use: what it takes; None unless it is loaded.
    """

    model: ServedModel
    state: ModelState
    progress: float
    reason: str
    num_requests: int
    num_waiting: int
    expires_in: float | None
    use: MemoryUse | None

    @property
    def model_id(self) -> str:
        return self.model.model_id
