"""The tokens of one call, on their way to the caller."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from batching.errors import DeadlineExceeded, EngineError
from batching.observer import SequenceStats
from batching.request import FinishReason, TokenOutput


class TokenStream:
    """The tokens of one or more sequences, as they come; yields (index, TokenOutput).

    The async iteration ends after the last sequence's output that carries a finish reason, or
    raises the error that ended one of them before its caller did.  `close()` never waits and may be called at any
    time, any number of times: unfinished sequences are aborted.

    sequences: the statistics of each one so far.
    deadline: on the event loop's clock; at that time DeadlineExceeded ends all that is unfinished.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceStats],
        release: Callable[[int, FinishReason], None],
        deadline: float | None = None,
    ) -> None:
        """`release` stops a sequence, given its index and why it ends."""
        self.sequences = sequences
        self._release = release
        self._deadline = deadline
        self._unfinished = set(range(len(sequences)))
        self._queue: asyncio.Queue[tuple[int, TokenOutput | EngineError]] = asyncio.Queue()
        # One for all tokens; it ends the wait for the next one.
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(deadline, self.put, 0, DeadlineExceeded())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, TokenOutput]:
        while self._unfinished:
            index, item = await self._queue.get()
            if self._is_late():
                # Also where tokens are always there, so that the timer never runs.
                item = DeadlineExceeded()
            is_late = isinstance(item, DeadlineExceeded)
            if index not in self._unfinished and not is_late:
                # Also the failure of a sequence whose caller had enough of it before.
                continue
            if isinstance(item, EngineError):
                self.close(FinishReason.TIMEOUT if is_late else FinishReason.ABORT)
                raise item
            if item.finish_reason is not None:
                self._unfinished.remove(index)
            return index, item
        raise StopAsyncIteration

    def finish(self, index: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Take no more of one sequence, and abort it if it has not ended."""
        self._unfinished.discard(index)
        self._release(index, reason)

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for index in range(len(self.sequences)):
            self.finish(index, reason)

    def put(self, index: int, item: TokenOutput | EngineError) -> None:
        self._queue.put_nowait((index, item))

    def _is_late(self) -> bool:
        return self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline
