"""Processes that serve one model together, over MLX's ring and TCP on this machine."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from batching.config import EngineConfig
from batching.engine.loaded_engine import LoadedEngine
from tests.support.rank_servers import free_ports

ROOT: Final = Path(__file__).parents[2]
HOST: Final = "127.0.0.1"
# Two slow cores that wait for each other, and others that use them.
TIMEOUT: Final = 150.0

Build = Callable[[EngineConfig], LoadedEngine]


@dataclass(frozen=True)
class Job:
    """A model to serve.

    scenario: what rank 0 does with it; it takes the configuration and what builds the engine.
    at_rank: what is other at a rank: fields of its configuration.
    fault: what goes wrong at a rank meanwhile.
    """

    scenario: Callable[[EngineConfig, Build], Any]
    config: EngineConfig
    at_rank: Mapping[int, EngineConfig] = field(default_factory=dict)
    faults: Mapping[int, Callable[[], AbstractContextManager[None]]] = field(default_factory=dict)

    def config_of(self, rank: int) -> EngineConfig:
        return self.at_rank.get(rank, self.config)

    def fault_of(self, rank: int) -> AbstractContextManager[None]:
        return self.faults.get(rank, nullcontext)()


@dataclass(frozen=True)
class RankSpec:
    """What a rank is told; `port` is that of rank 0 for messages."""

    rank: int
    num_ranks: int
    port: int
    jobs: Sequence[Job]
    results: Path


@dataclass(frozen=True)
class RankRun:
    """How a rank has ended.

    results: of each job; a text is the error with which it ended.
    """

    status: int
    stderr: str
    results: list[Any]


def run_ranks(folder: Path, jobs: Sequence[Job], num_ranks: int = 2) -> list[RankRun]:
    """Let ranks do some jobs, one after the other, until all of them have ended."""
    port = free_ports(num_ranks + 1)
    ring = range(port + 1, port + 1 + num_ranks)
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"{HOST}:{each}"] for each in ring]))
    specs = [
        RankSpec(rank, num_ranks, port, jobs, folder / f"rank{rank}.results")
        for rank in range(num_ranks)
    ]
    with ExitStack() as stack:
        started = [stack.enter_context(_started(spec, hosts)) for spec in specs]
        return [_ended(*pair) for pair in zip(specs, started, strict=True)]


@contextmanager
def _started(spec: RankSpec, hosts: Path) -> Iterator["subprocess.Popen[bytes]"]:
    path = spec.results.with_suffix(".spec")
    path.write_bytes(pickle.dumps(spec))
    with spec.results.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_process", str(path)],
            cwd=ROOT,
            env={**os.environ, "MLX_RANK": str(spec.rank), "MLX_HOSTFILE": str(hosts)},
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ended(spec: RankSpec, process: "subprocess.Popen[bytes]") -> RankRun:
    status = process.wait(TIMEOUT)
    results = pickle.loads(spec.results.read_bytes()) if spec.results.exists() else []
    return RankRun(status, spec.results.with_suffix(".log").read_text(), results)
