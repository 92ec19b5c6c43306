"""What a client saw of one request."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request; times are a clock's seconds, None is what the server did not tell.

    `chunk_times` holds a time for each chunk with text.  The first of them is the first token:
    servers may say hello earlier, with a chunk that names the role.
    """

    sent: float
    ended: float
    chunk_times: tuple[float, ...] = ()
    text: str = ""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    finish_reason: str | None = None
    priority: str | None = None
    status: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """The time to the first token."""
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def e2e(self) -> float:
        """The time to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """The time per output token after the first; a single token has none."""
        if self.ttft is None or self.num_output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """The times between one chunk and the next."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]
