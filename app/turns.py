"""Who is next among keys that wait for the same."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final


class Turns:
    """Hands out slots to keys: the next one to the key that has the fewest; equal ones alternate.

    However many wait for one key, another key waits no longer for that.  It lives on the event loop.
    """

    def __init__(self, has_slot: Callable[[int], bool], *, max_of_key: int | None = None) -> None:
        """Hand out slots.

        has_slot: returns whether there is one more beside so many that are taken.
        max_of_key: the most that one key has at a time; None is no limit.
        """
        self._has_slot: Final = has_slot
        self._max_of_key: Final = math.inf if max_of_key is None else max_of_key
        # The key that was last is at the end.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_of_key: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        return self._num_of_key.total()

    async def acquire(self, key: str) -> None:
        """Wait for a slot."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self.wake()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.release(key)
            raise

    def release(self, key: str) -> None:
        self._num_of_key[key] -= 1
        if not self._num_of_key[key]:
            del self._num_of_key[key]
        self.wake()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Hold a slot for the block."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    def wake(self) -> None:
        """Hand out the slots that there are; called when there may be more."""
        while self._waiting and self._has_slot(self.num_taken):
            # The first of equal ones.
            key = min(self._waiting, key=self._num_of_key.__getitem__)
            if self._num_of_key[key] >= self._max_of_key:
                break
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns
            if not turn.done():
                turn.set_result(None)
                self._num_of_key[key] += 1
