"""Two replicas of one thread each, and smg before one or both of them."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from scripts.cluster.replica import Replica
from scripts.cluster.router import Smg

# The pool is that of the traces of the benchmark.
NUM_BLOCKS: Final = 88
SETTINGS: Final = {
    "cpu_threads": "1",
    "num_blocks": str(NUM_BLOCKS),
    "max_draft_tokens": "0",
    "generation_config": "openai",
}


class Counts(NamedTuple):
    """The replicas' own counters, all together."""

    num_prompt: float
    num_cached: float

    @classmethod
    def of(cls, replicas: Sequence[Replica]) -> "Counts":
        """Read `/metrics` of each replica."""
        pages = [_metrics(replica.url) for replica in replicas]
        return cls(
            sum(_value(page, "vllm:prompt_tokens_total") for page in pages),
            sum(_value(page, "vllm:prompt_tokens_cached_total") for page in pages),
        )


@contextmanager
def replicas(count: int, folder: Path, *, is_pinned: bool = True) -> Iterator[list[Replica]]:
    """Start replicas, and end them.

    is_pinned: each has a core of its own, if there are as many.  Otherwise one alone uses some of the others, too:
        what plans the next step, and what answers clients, are other threads than the one that computes.

    Raises:
        ServerFailed: one has ended.
        TimeoutError: one takes too long.
    """
    started = [Replica(str(number), folder, SETTINGS) for number in range(1, count + 1)]
    try:
        cores = os.sched_getaffinity(0)
        for each, core in zip(started, cycle(sorted(cores)), strict=False):
            # It inherits what this process may use.
            os.sched_setaffinity(0, {core} if is_pinned else cores)
            try:
                each.start()
            finally:
                os.sched_setaffinity(0, cores)
        for each in started:
            each.wait_until_ready()
        yield started
    finally:
        for each in started:
            each.kill()


class MeasuredSmg(Smg):
    """smg that says how much of a core it has used."""

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        # Behind the name, which may have spaces.
        user, system = fields.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def smg(behind: Sequence[Replica], folder: Path, policy: str) -> Iterator[MeasuredSmg]:
    """Start smg with a policy and an empty tree of prefixes."""
    urls = [each.url for each in behind]
    with MeasuredSmg(urls, folder, options=["--policy", policy]) as router:
        router.start()
        router.wait_until_ready()
        yield router


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=10, trust_env=False).raise_for_status().text


def _value(page: str, name: str) -> float:
    lines = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, lines))
