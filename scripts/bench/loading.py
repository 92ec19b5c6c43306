"""How long a stream stops while another model loads.

`python -m scripts.bench.loading MODEL` loads the bundled model, generates with it, loads MODEL beside that (a file, a
directory or a hub id), and unloads it again.  It prints the gaps between the stream's tokens and the longest slices of
the load, without a server and without the cache of packed weights.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Final, TypeVar

from batching.backend.builder.engine import build_engine
from batching.backend.loader import BUNDLED_MODEL
from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.mlx_thread import MLXThread
from batching.inputs.sequence_spec import SequenceSpec

_NUM_TOKENS: Final = 8000
# Seconds.
_ALONE: Final = 2.0
_NUM_LONGEST: Final = 5

T = TypeVar("T")


class MeasuredSlices:
    """Measures the slices of a load, in seconds."""

    def __init__(self, slices: LoadSlices) -> None:
        self.durations: list[float] = []
        self._slices = slices
        self._began = monotonic()

    def pause(self, progress: float | None = None) -> None:
        self._end()
        self._slices.pause(progress)
        self._began = monotonic()

    def in_thread(self, func: Callable[[], T]) -> T:
        self._end()
        result = self._slices.in_thread(func)
        self._began = monotonic()
        return result

    def _end(self) -> None:
        self.durations.append(monotonic() - self._began)


class Gaps:
    """The times between the tokens of a stream, by what happens meanwhile."""

    def __init__(self) -> None:
        self.phase = "alone"
        self._gaps: dict[str, list[float]] = {}

    async def read(self, engine: AsyncEngine) -> None:
        spec = SequenceSpec(prompt=(1, 2, 3, 4), max_tokens=_NUM_TOKENS)
        last: float | None = None
        async for _ in await engine.submit([spec]):
            now = monotonic()
            if last is not None:
                self._gaps.setdefault(self.phase, []).append(now - last)
            last = now

    def __str__(self) -> str:
        return "\n".join(map(self._line, self._gaps))

    def _line(self, phase: str) -> str:
        gaps = sorted(self._gaps[phase])
        p50, p99 = (gaps[int(len(gaps) * share)] * 1000 for share in (0.5, 0.99))
        longest = f"longest {gaps[-1] * 1000:.0f} ms"
        return f"{phase}: {len(gaps)} tokens, gaps p50 {p50:.1f} ms, p99 {p99:.0f} ms, {longest}"


def engine(model: str, thread: MLXThread, measured: list[MeasuredSlices]) -> AsyncEngine:
    config = EngineConfig(model=model, model_id=model, max_blocks=256, weights_cache_gib=0)

    def build(slices: LoadSlices) -> LoadedEngine:
        measured.append(MeasuredSlices(slices))
        return build_engine(config, measured[-1])

    return AsyncEngine(build, thread)


async def measure(model: str) -> None:
    thread, measured, gaps = MLXThread(), list[MeasuredSlices](), Gaps()
    first = engine(BUNDLED_MODEL, thread, measured)
    await asyncio.to_thread(first.start)
    reading = asyncio.create_task(gaps.read(first))
    await asyncio.sleep(_ALONE)
    gaps.phase, began = "while it loads", monotonic()
    second = engine(model, thread, measured)
    await asyncio.to_thread(second.start)
    seconds = monotonic() - began
    gaps.phase = "loaded"
    await asyncio.sleep(_ALONE)
    gaps.phase = "unloaded"
    await asyncio.to_thread(second.stop)
    await asyncio.sleep(_ALONE)
    reading.cancel()
    await asyncio.to_thread(partial(thread.stop, 60))
    durations = sorted(measured[-1].durations, reverse=True)
    longest = ", ".join(f"{each * 1000:.0f}" for each in durations[:_NUM_LONGEST])
    print(gaps)
    print(f"loaded in {seconds:.1f} s, in {len(durations)} slices; the longest {longest} ms")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.loading", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    asyncio.run(measure(parser.parse_args(argv).model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
