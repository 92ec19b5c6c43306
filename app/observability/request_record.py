"""What became of a request, in numbers and names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.api.openai.schemas.usage import Usage
from batching import SequenceStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times are in seconds, `entered` on the engine's clock.

    ending: finish reasons, or `aborted`, `timeout`, `failed`.
    trace_headers: where the caller's trace goes on (W3C Trace Context).
    """

    completion_id: str
    request_id: str
    client_name: str
    entered: float
    elapsed: float
    answers: Sequence[SequenceStats]
    usage: Usage
    ending: str
    trace_headers: Mapping[str, str]

    @property
    def queue_time(self) -> float | None:
        """How long until a step read of it; None if none did."""
        return self._since([answer.scheduled_time for answer in self.answers])

    @property
    def first_token_time(self) -> float | None:
        """How long until the first token; None if there was none."""
        return self._since([answer.first_token_time for answer in self.answers])

    @property
    def num_preemptions(self) -> int:
        return sum(answer.num_preemptions for answer in self.answers)

    def _since(self, times: Sequence[float | None]) -> float | None:
        known = [time for time in times if time is not None]
        return min(known) - self.entered if known else None
