"""The tokens of one call, on their way to whoever asked."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from batching.errors import DeadlineExceeded, EngineError
from batching.observer import SequenceStats
from batching.request import TokenOutput


class TokenStream:
    """The tokens of one or more answers, as they come; an async iterator of (index, TokenOutput).

    It ends after the last answer's output that carries a finish reason, or raises what ended
    one of them.  `close()` never waits and may be called at any time, any number of times:
    unfinished answers are aborted.

    answers: what became of each one so far.
    deadline: when the event loop's clock shows that, DeadlineExceeded ends all that is left.
    """

    def __init__(
        self,
        answers: Sequence[SequenceStats],
        release: Callable[[int, str], None],
        deadline: float | None = None,
    ) -> None:
        """`release` stops an answer, given its index and why it ends."""
        self.answers = answers
        self._release = release
        self._deadline = deadline
        self._unfinished = set(range(len(answers)))
        self._queue: asyncio.Queue[tuple[int, TokenOutput | EngineError]] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, TokenOutput]:
        while self._unfinished:
            index, item = await self._next()
            if isinstance(item, EngineError):
                self.close()
                raise item
            if index not in self._unfinished:
                continue
            if item.finish_reason is not None:
                self._unfinished.remove(index)
            return index, item
        raise StopAsyncIteration

    def finish(self, index: int, reason: str = "abort") -> None:
        """Take no more of one answer, and abort it if it has not ended."""
        self._unfinished.discard(index)
        self._release(index, reason)

    def close(self, reason: str = "abort") -> None:
        for index in range(len(self.answers)):
            self.finish(index, reason)

    def put(self, index: int, item: TokenOutput | EngineError) -> None:
        self._queue.put_nowait((index, item))

    async def _next(self) -> tuple[int, TokenOutput | EngineError]:
        try:
            async with asyncio.timeout_at(self._deadline):
                # Also when the next item is there already, so that getting it would not wait.
                if self._deadline is not None:
                    await asyncio.sleep(0)
                return await self._queue.get()
        except TimeoutError:
            self.close("timeout")
            raise DeadlineExceeded from None
