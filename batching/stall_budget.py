"""How many prompt tokens a step may read without stalling the running streams."""


class StallBudget:
    """Learns what a prompt token costs here, and turns milliseconds into tokens.

    A step without prompt tokens shows what the decodes alone take; what a mixed step takes
    beyond that is the prompt's.  Both are smoothed, so that one slow step changes little.
    """

    _SMOOTHING = 0.2
    # A prompt must move on, however slow the machine.
    _MIN_TOKENS = 16

    def __init__(self, max_stall: float) -> None:
        """`max_stall` is in seconds."""
        self._max_stall = max_stall
        self._decode_time: float | None = None
        self._time_per_token: float | None = None

    @property
    def max_prefill_tokens(self) -> int | None:
        """None until a mixed step has been seen."""
        if not self._time_per_token:
            return None
        return max(self._MIN_TOKENS, int(self._max_stall / self._time_per_token))

    def record(self, num_prefill_tokens: int, num_decode_tokens: int, duration: float) -> None:
        """Learn from a step that took `duration` seconds."""
        if num_prefill_tokens == 0:
            self._decode_time = self._smooth(self._decode_time, duration)
            return
        decode_time = (self._decode_time or 0.0) if num_decode_tokens else 0.0
        cost = max(duration - decode_time, 0.0) / num_prefill_tokens
        self._time_per_token = self._smooth(self._time_per_token, cost)

    def _smooth(self, old: float | None, new: float) -> float:
        return new if old is None else old + self._SMOOTHING * (new - old)
