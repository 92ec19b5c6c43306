"""The record of a finished request, for the log and for traces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batching import SequenceStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """The token counts of a request, over all its prompts and choices.

    num_image_tokens: prompt tokens that are of images.
    num_cached_tokens: prompt tokens that were found in the prefix cache.
    written_tokens: prompt tokens that were computed and are retained, by the seconds for which they are.
    num_output_tokens: all generated tokens, including those that ended the text.
    num_reasoning_tokens: output tokens that are reasoning.
    """

    num_prompt_tokens: int
    num_image_tokens: int = 0
    num_cached_tokens: int = 0
    written_tokens: Mapping[float, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def num_written_tokens(self) -> int:
        """Prompt tokens that were computed and are retained."""
        return sum(self.written_tokens.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The record of a finished request.  Times are in seconds, `arrival` on the engine's clock.

    outcome: finish reasons, or `aborted`, `timeout` or `failed`.
    trace_headers: the client's W3C Trace Context headers.
    """

    completion_id: str
    model_id: str
    request_id: str
    client_name: str
    arrival: float
    elapsed: float
    sequences: Sequence[SequenceStats]
    usage: TokenUsage
    outcome: str
    trace_headers: Mapping[str, str]

    @property
    def queue_time(self) -> float | None:
        """Seconds until a step of the model served it; None if none did."""
        return self._since([sequence.scheduled_time for sequence in self.sequences])

    @property
    def first_token_time(self) -> float | None:
        """Seconds until the first token; None if there was none."""
        return self._since([sequence.first_token_time for sequence in self.sequences])

    @property
    def num_preemptions(self) -> int:
        return sum(sequence.num_preemptions for sequence in self.sequences)

    def _since(self, times: Sequence[float | None]) -> float | None:
        known = [time for time in times if time is not None]
        return min(known) - self.arrival if known else None
