"""Opens and closes an engine again and again in one process; prints what the process holds after each time.

    python -m tests.support.engine_cycles MODEL NUM_CYCLES

A line of JSON each: resident MiB, the names of the threads, and what MLX and the kernels hold.
"""

import asyncio
import gc
import json
import sys
import threading
from pathlib import Path

from batching.backend.memory.device import memory_in_use
from batching.config import EngineConfig
from batching.inputs.sequence_spec import SequenceSpec
from batching.scheduler_manager import SchedulerManager

_MIB = 2**20
_PAGE = 4096


async def _cycle(model: str) -> None:
    config = EngineConfig(model=model, model_id="m", max_blocks=64, weights_cache_gib=0)
    manager = SchedulerManager([config])
    engine = await asyncio.to_thread(manager.get, "m")
    stream = await engine.submit([SequenceSpec(prompt=(1, 2, 3), max_tokens=4)])
    async for _ in stream:
        pass
    manager.close()


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / _MIB


if __name__ == "__main__":
    for _ in range(int(sys.argv[2])):
        asyncio.run(_cycle(sys.argv[1]))
        gc.collect()
        # The kernels' pool of a moment ago may still be prefaulted.
        for thread in threading.enumerate():
            if thread.name == "kv-pool-pages":
                thread.join()
        names = sorted(thread.name for thread in threading.enumerate())
        sys.stdout.write(json.dumps([_resident(), names, memory_in_use()]) + "\n")
