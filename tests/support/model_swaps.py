"""Swaps two models that do not fit together, again and again under load; prints what the process holds.

    python -m tests.support.model_swaps MODEL MODEL NUM_SWAPS

A line of JSON after every 20 loads: their number, resident MiB, what MLX and the kernels hold in bytes, threads,
open files, and requests that have failed.
"""

import asyncio
import json
import os
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Final

from batching.backend.builder.engine import build_engine
from batching.backend.memory.device import memory_in_use
from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.inputs.sequence_spec import SequenceSpec
from batching.models.residency.model_state import MemoryNeed
from batching.scheduler_manager import SchedulerManager

_MIB: Final = 2**20
_PAGE: Final = 4096
_EVERY: Final = 20
_NUM_CLIENTS: Final = 3


class Swaps:
    def __init__(self, models: list[str], num_swaps: int) -> None:
        configs = [
            EngineConfig(model=model, model_id=model, max_blocks=64, weights_cache_gib=0)
            for model in models
        ]
        self.num_loads = self.num_failed = self.num_served = 0
        self._num_swaps = num_swaps
        self._manager = SchedulerManager(
            configs, self._build, capacity=1, min_resident=0.0, need=lambda _: MemoryNeed(1, 1)
        )

    def _build(self, config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        self.num_loads += 1
        if self.num_loads % _EVERY == 0:
            self._report()
        # It takes the only place, whatever it has.
        return replace(build_engine(config, slices), memory=MemoryUse(weights=1))

    def _report(self) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / _MIB
        # Those that prefault a pool end by themselves.
        threads = [t.name for t in threading.enumerate() if t.name != "kv-pool-pages"]
        files = len(os.listdir("/proc/self/fd"))
        line = [self.num_loads, resident, memory_in_use(), len(threads), files, self.num_failed]
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    async def run(self) -> None:
        await asyncio.gather(*(self._ask(random.Random(i)) for i in range(_NUM_CLIENTS)))
        self._manager.close()

    async def _ask(self, rng: random.Random) -> None:
        while self.num_loads < self._num_swaps:
            lease = self._manager.request(rng.choice(self._manager.model_ids))
            try:
                engine = (await asyncio.wrap_future(lease.future)).engine
                prompt = tuple(rng.randrange(26) for _ in range(rng.randrange(1, 20)))
                stream = await engine.submit([SequenceSpec(prompt=prompt, max_tokens=4)])
                async for _ in stream:
                    pass
                self.num_served += 1
            except Exception:
                self.num_failed += 1
            finally:
                lease.close()


if __name__ == "__main__":
    asyncio.run(Swaps(sys.argv[1:3], int(sys.argv[3])).run())
