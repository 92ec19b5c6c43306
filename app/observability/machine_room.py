"""The machine room: live snapshots of an engine, taken only while clients watch, shared by all of them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from time import perf_counter
from typing import Final

from app.observability.engine_frame import EngineCounts, encode_frame
from batching import (
    AsyncEngine,
    EngineObserver,
    EngineStopped,
    NewTokens,
    Observers,
    SchedulerStats,
    SequenceStats,
    StepRecord,
)

# Seconds between two snapshots.
INTERVAL: Final = 0.25
# A snapshot and its encoding take at most this share of the time; large ones come less often.
_MAX_SHARE: Final = 0.005
_NUM_FIRST_TOKENS: Final = 100


class LiveCounts:
    """Counts tokens and steps while the engine is watched; an EngineObserver.

    Prompt tokens count when they are prefilled; those found in the prefix cache do not count.
    """

    def __init__(self) -> None:
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._first_tokens: deque[float] = deque(maxlen=_NUM_FIRST_TOKENS)

    def observe_step(self, step: StepRecord) -> None:
        self._num_steps += 1
        self._num_prompt_tokens += step.num_prompt_tokens
        self._step_seconds += step.duration

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Ignore them: a snapshot has them."""

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        for sequence, num_tokens, gap in tokens:
            self._num_output_tokens += num_tokens
            if gap is None and sequence.first_token_time is not None:
                self._first_tokens.append(sequence.first_token_time - sequence.arrival_time)

    def observe_end(self, sequence: SequenceStats) -> None:
        """Ignore it: the next snapshot does not have it."""

    def read(self) -> EngineCounts:
        return EngineCounts(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_steps,
            self._step_seconds,
            tuple(self._first_tokens),
        )


class Watcher:
    """A client that watches an engine; if it reads too slowly, it misses frames."""

    def __init__(self, watch: "EngineWatch") -> None:
        self._watch = watch

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield events as they come, until the engine stops."""
        while (frame := await self._watch.next_frame()) is not None:
            yield frame

    def close(self) -> None:
        """Stop watching; may be called any number of times."""
        self._watch.leave(self)


class EngineWatch:
    """Takes snapshots of an engine while it has watchers.

    The observer of the engine is wrapped only during that time, so that counting costs nothing otherwise.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._watchers: set[Watcher] = set()
        self._frame: bytes | None = None
        self._published = asyncio.Event()
        self._has_ended = False

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def watch(self) -> Watcher:
        """Add a watcher; it must be closed."""
        watcher = Watcher(self)
        if not self._watchers:
            self._begin()
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher; the last one stops the snapshots."""
        if watcher not in self._watchers:
            return
        self._watchers.remove(watcher)
        if not self._watchers:
            self._task.cancel()
            self.engine.observer = self._observer

    async def next_frame(self) -> bytes | None:
        """Wait for the next frame; None if there are no more."""
        if not self._has_ended:
            await self._published.wait()
        return self._frame

    def _begin(self) -> None:
        counts = LiveCounts()
        self._has_ended = False
        self._observer: EngineObserver = self.engine.observer
        self.engine.observer = Observers(self._observer, counts)
        self._task = asyncio.create_task(self._run(counts))

    async def _run(self, counts: LiveCounts) -> None:
        try:
            while True:
                snapshot = await self.engine.snapshot()
                began = perf_counter()
                reason = self.engine.health.unhealthy_reason
                self._publish(encode_frame(snapshot, counts.read(), reason))
                cost = snapshot.duration + perf_counter() - began
                await asyncio.sleep(max(INTERVAL, cost / _MAX_SHARE))
        except EngineStopped:
            self._has_ended = True
            self._publish(None)

    def _publish(self, frame: bytes | None) -> None:
        self._frame = frame
        published, self._published = self._published, asyncio.Event()
        published.set()


class MachineRoom:
    """The engines that are watched, by model id."""

    def __init__(self) -> None:
        self._watches: dict[str, EngineWatch] = {}

    @property
    def num_watchers(self) -> int:
        return sum(watch.num_watchers for watch in self._watches.values())

    def watch(self, engine: AsyncEngine) -> Watcher:
        """Watch the engine of a model."""
        name = engine.model.model_id
        if name not in self._watches or self._watches[name].engine is not engine:
            # It has been loaded again since.
            self._watches[name] = EngineWatch(engine)
        return self._watches[name].watch()
