"""How many prompt tokens a step may prefill without stalling the running streams."""

from math import inf
from typing import Final

# Prompt tokens that a step may always prefill beside streams.
MIN_CHUNK: Final = 32


class StallBudget:
    """Measures how long steps take, and converts time into a number of prompt tokens.

    A step takes some time for its decodes, and each prompt token beside them adds to it.  Prompts may add
    as much time to a step as its decodes take alone, so that the inter-token latency of running requests
    at most doubles during a prefill.  If more prompts wait than requests decode, they may add that time
    once for each prompt per decoding request; otherwise one early request would keep all the others
    waiting.  A step may always process `min_chunk` prompt tokens, because short chunks of a long prompt
    attend to its context again and again.  `max_stall` bounds the added time in any case.

    Images are encoded in other steps than prompts, for as long as `max_stall` allows beside streams; what that takes
    is measured by the bytes that the tower reads.

    A step without decodes stalls no stream, but a request that arrives meanwhile waits for its end: it takes
    `max_alone`, about.
    """

    # The weight of earlier steps against the newest one.
    _MEMORY = 0.8
    # A prompt must advance, however slow the machine.
    _MIN_TOKENS = 16

    def __init__(self, max_stall: float, min_chunk: int, max_alone: float = inf) -> None:
        """`max_stall` and `max_alone` are in seconds, `min_chunk` in tokens."""
        self._max_stall = max_stall
        self._max_alone = max_alone
        self._min_chunk = min_chunk
        # The mean of the recent steps without prompts; 0 is unknown, as in the sums below.
        self._decode_duration = 0.0
        # Seconds that prompts added to the recent steps that had some, and their tokens.
        self._prefill_duration = 0.0
        self._num_tokens = 0.0
        # Seconds that images added to the recent steps that encoded some, and their bytes.
        self._encode_duration = 0.0
        self._num_bytes = 0.0

    def max_prefill_tokens(
        self, num_prompts: int, num_streams: int, *, has_other_streams: bool = False
    ) -> int | None:
        """Return how many prompt tokens a step may process beside the decodes of `num_streams` requests.

        Until a prefill was measured it is None (no limit), since every request begins with one, or
        `min_chunk` where requests of other engines decode.
        """
        if num_streams == 0 and not has_other_streams:
            return self._max_tokens_alone()
        most = self._max_tokens(max(1, num_prompts / max(1, num_streams)), self._min_chunk)
        return self._min_chunk if most is None and has_other_streams else most

    def max_interruptible_tokens(self) -> int | None:
        """Return how many prompt tokens a step may process that an interactive request may have to wait for.

        It is small even where longer chunks would be more efficient.  None until a prefill was measured.
        """
        return self._max_tokens(1, self._MIN_TOKENS)

    def max_seconds(self, *, has_streams: bool) -> float:
        """Return how long what is neither a prompt nor a decode may take in a step."""
        return self._max_stall if has_streams else self._max_alone

    @property
    def seconds_per_token(self) -> float:
        """What a token of a prompt has taken lately; 0 before that was measured."""
        return self._prefill_duration / self._num_tokens if self._num_tokens else 0.0

    def max_image_bytes(self, *, has_streams: bool) -> float:
        """Return how many bytes of images a step may encode; 0, as few as possible, until that was measured."""
        seconds = self.max_seconds(has_streams=has_streams)
        if seconds == inf:
            return inf
        return seconds * self._num_bytes / self._encode_duration if self._encode_duration else 0.0

    def _max_tokens_alone(self) -> int | None:
        if self._prefill_duration == 0 or self._max_alone == inf:
            return None
        return max(self._MIN_TOKENS, round(self._max_alone * self._tokens_per_second))

    @property
    def _tokens_per_second(self) -> float:
        return self._num_tokens / self._prefill_duration

    def _max_tokens(self, num_decodes: float, min_chunk: int) -> int | None:
        """Return how many prompt tokens take as long as `num_decodes` steps of decodes."""
        if self._prefill_duration == 0:
            return None
        most = round(self._max_stall * self._tokens_per_second)
        wanted = round(self._decode_duration * num_decodes * self._tokens_per_second)
        if self._decode_duration == 0:
            wanted = most
        return max(self._MIN_TOKENS, min(most, max(min_chunk, wanted)))

    def record(self, num_prefill_tokens: int, num_decode_tokens: int, duration: float) -> None:
        """Learn from a step that took `duration` seconds."""
        if num_prefill_tokens == 0:
            known = self._decode_duration or duration
            self._decode_duration = self._MEMORY * known + (1 - self._MEMORY) * duration
            return
        if duration < self._decode_duration:
            # There were more streams when that was measured.
            self._decode_duration = (
                duration * num_decode_tokens / (num_prefill_tokens + num_decode_tokens)
            )
        added = duration - (self._decode_duration if num_decode_tokens else 0)
        self._prefill_duration = self._MEMORY * self._prefill_duration + added
        self._num_tokens = self._MEMORY * self._num_tokens + num_prefill_tokens

    def record_images(
        self, num_bytes: float, num_prefill_tokens: int, num_decode_tokens: int, duration: float
    ) -> None:
        """Learn from a step that took `duration` seconds and encoded images, of so many bytes."""
        others = self._decode_duration if num_decode_tokens else 0.0
        if self._num_tokens:
            others += num_prefill_tokens * self._prefill_duration / self._num_tokens
        # What others take is an estimate, perhaps of more streams: it leaves some of the time to the images.
        added = max(duration - others, duration / 4)
        self._encode_duration = self._MEMORY * self._encode_duration + added
        self._num_bytes = self._MEMORY * self._num_bytes + num_bytes
