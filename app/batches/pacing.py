"""Limits how many lines of batches are in flight: enough to keep the model busy, few beside live requests."""

import asyncio
from typing import Final

from app.admission.controller import AdmissionController
from app.turns import Turns
from batching import QUIET_PERIOD, Priority

# Lines that wait for a slot, so that a step is full while the next line is prepared: one for each
# so many slots.
_SLOTS_PER_WAITING: Final = 2
_MIN_WAITING: Final = 2


class Pacer:
    """Hands out slots for lines, over all batches; keys take turns, and those of one key in order.

    While live requests arrive, there are few slots: the engine lets lines wait for live requests, but a live
    request still has to wait for the step that is running.  All slots are available again when no live
    request came for `QUIET_PERIOD` seconds.  There is always at least one, so that every batch ends.  It
    lives on the event loop.
    """

    def __init__(self, admission: AdmissionController, num_beside_live: int = 1) -> None:
        """`num_beside_live` is the number of slots while live requests come."""
        limits = admission.limits
        num_waiting = max(_MIN_WAITING, limits.max_num_seqs // _SLOTS_PER_WAITING)
        self._num_slots: Final = min(
            limits.max_num_seqs + num_waiting, limits.max_requests(Priority.LOW)
        )
        self._num_beside_live: Final = num_beside_live
        self._admission: Final = admission
        self._turns: Final = Turns(self._has_slot)
        self._backing_off: list[asyncio.Future[None]] = []

    @property
    def num_taken(self) -> int:
        return self._turns.num_taken

    async def acquire(self, key: str) -> "Slot":
        """Wait for a slot for a line of an API key."""
        await self._turns.acquire(key)
        return Slot(self, key)

    def release(self, key: str) -> None:
        self._turns.release(key)
        self.wake()

    async def back_off(self) -> None:
        """Wait until the situation may have changed: a line has ended, or a second has passed."""
        turn = asyncio.get_running_loop().create_future()
        self._backing_off.append(turn)
        await turn

    def wake(self) -> None:
        """Let waiting lines check again; called at the end of each line and once a second."""
        waiting, self._backing_off = self._backing_off, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
        self._turns.wake()

    def _has_slot(self, num_taken: int) -> bool:
        admission = self._admission
        if admission.is_draining:
            return False
        is_live = admission.seconds_since_live() < QUIET_PERIOD
        num_slots = min(self._num_slots, self._num_beside_live) if is_live else self._num_slots
        return num_taken < num_slots and admission.num_requests < admission.limits.max_requests(
            Priority.LOW
        )


class Slot:
    """The permission of one line to be in flight; `release` may be repeated."""

    def __init__(self, pacer: Pacer, key: str) -> None:
        self._pacer: Final = pacer
        self._key: Final = key
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._pacer.release(self._key)
