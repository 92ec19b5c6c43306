"""How many prompt tokens a step may read without stalling the running streams."""


class StallBudget:
    """Learns what a token costs here, and turns milliseconds into tokens.

    The cost is the time of the recent steps that read prompts, over all their tokens.  What a
    step costs whatever it reads is part of that, so short steps make it look higher than it
    is: the budget errs on the side of the streams, and longer steps correct it.
    """

    # The weight of what is known already against the newest step.
    _MEMORY = 0.8
    # A prompt must move on, however slow the machine.
    _MIN_TOKENS = 16

    def __init__(self, max_stall: float) -> None:
        """`max_stall` is in seconds."""
        self._max_stall = max_stall
        self._duration = 0.0
        self._num_tokens = 0.0

    @property
    def max_prefill_tokens(self) -> int | None:
        """None until a step has read a prompt; every stream began with one."""
        if self._duration == 0:
            return None
        num_tokens = self._max_stall * self._num_tokens / self._duration
        return max(self._MIN_TOKENS, round(num_tokens))

    def record(self, num_prefill_tokens: int, num_decode_tokens: int, duration: float) -> None:
        """Learn from a step that took `duration` seconds."""
        if num_prefill_tokens:
            num_tokens = num_prefill_tokens + num_decode_tokens
            self._duration = self._MEMORY * self._duration + duration
            self._num_tokens = self._MEMORY * self._num_tokens + num_tokens
