"""The parts of a run, each against a server of its own."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Final

import numpy as np

from scripts.server_process import (
    Address,
    Server,
    num_open_files,
    resident_bytes,
    wait_until,
)
from scripts.soak import departures, fairness, mixed, overload
from scripts.soak.checks import Check, Trend, at_most, equal, none_of, trend
from scripts.soak.client import CHAT, ask_all
from scripts.soak.gauges import gauges, held, metrics_text, num_above
from scripts.soak.prober import Prober

_NUM_SLOTS: Final = 8
_MIB: Final = float(1 << 20)
_HOUR: Final = 3600.0
_MINUTE: Final = 60.0
# Seconds between two samples of a long run.
_SAMPLE_INTERVAL: Final = 5.0
_MAX_DELAY: Final = 0.1
_OVERLOAD: Final = 10
# A long run's pool: so small that it is full, and evicts and preempts, before the warm-up ends.
_SMALL_POOL: Final = "192"
_LONG_CLIENTS: Final = 16
_MIN_THROUGHPUT_RATIO: Final = 0.95
# MiB an hour; one kilobyte that each request leaves behind is about 10.
_MAX_GROWTH: Final = 20.0
_GENERATED: Final = "vllm:generation_tokens_total"
_LOOP_LAG: Final = "mlx_server:event_loop_lag_seconds"


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is; times are in seconds."""

    num_leaving: int = 1000
    flood_time: float = 60.0
    num_low: int = 30
    long_time: float = 1200.0
    warm_up: float = 180.0
    seed: int = 1


def departing_clients(size: Size) -> Iterator[Check]:
    """Yield what is left of clients that leave: nothing, and an unharmed server."""
    with Server(max_queued_requests="64") as server:
        address = server.address()
        texts = asyncio.run(mixed.reference_texts(address))
        num_files = num_open_files(server.pid)
        began = monotonic()
        left = asyncio.run(departures.storm(address, size.num_leaving, size.seed))
        yield Check("clients that left", f"{left.total()} in {monotonic() - began:.0f} s")
        yield from _what_is_left(server, num_files)
        yield none_of("admission tickets not released", asyncio.run(_rejections(address)))
        yield _same_completions(address, texts)
        yield from _end(server)


async def _rejections(address: Address) -> list[str]:
    """Send as many requests at once as admission control allows; return those not completed."""
    bodies = [
        overload.request(i, max_tokens=1) | {"priority": "high"} for i in range(_NUM_SLOTS + 64)
    ]
    return [str(o) for o in await ask_all(address, CHAT, bodies) if not o.is_complete]


def overloaded(size: Size) -> Iterator[Check]:
    """Yield what becomes of ten times more requests than can be served."""
    with Server() as server:
        address = server.address()
        asyncio.run(mixed.reference_texts(address))
        num_files = num_open_files(server.pid)
        capacity = asyncio.run(
            overload.measure_capacity(address, num_requests=64, at_once=_NUM_SLOTS)
        )
        rate = _OVERLOAD * capacity
        yield Check("capacity", f"{capacity:.1f} requests/s, sent {rate:.0f}/s")
        num_requests = round(rate * size.flood_time)
        with Prober(address) as prober:
            outcomes = asyncio.run(overload.flood(address, num_requests=num_requests, rate=rate))
            latencies = prober.latencies()
        for ending, count in sorted(overload.counts(outcomes).items()):
            yield Check(f"ended with {ending}", str(count))
        yield none_of("neither completed nor rejected well", overload.faults(outcomes))
        yield from _health(latencies)
        num_late = num_above(asyncio.run(metrics_text(address)), _LOOP_LAG, _MAX_DELAY)
        yield equal("looks at an event loop over 100 ms late", num_late, 0)
        yield from _what_is_left(server, num_files)
        yield from _end(server)


def _what_is_left(server: Server, num_files: int) -> Iterator[Check]:
    """Yield what the server holds once no request is in flight."""
    address = server.address()

    def is_idle() -> bool:
        return not any(asyncio.run(held(address)).values())

    with suppress(TimeoutError):
        wait_until(is_idle, "something is held")
        # To ask takes a connection, too.
        wait_until(lambda: num_open_files(server.pid) <= num_files, "connections are open")
    yield at_most("open files", num_open_files(server.pid), num_files, "")
    for name, value in asyncio.run(held(address)).items():
        yield equal(name, value, 0.0)


def _same_completions(address: Address, texts: Sequence[str]) -> Check:
    are_same = asyncio.run(mixed.reference_texts(address)) == texts
    return Check("later completions are the same", "yes" if are_same else "no", "yes", are_same)


def _end(server: Server) -> Iterator[Check]:
    yield equal("exit status", server.stop(), 0)
    yield equal("tracebacks in the log", server.log.count("Traceback"), 0)


def _health(latencies: Sequence[float | None]) -> Iterator[Check]:
    good = sorted(1000 * latency for latency in latencies if latency is not None)
    yield equal("probes of /health that failed", len(latencies) - len(good), 0)
    yield Check("probes of /health", str(len(good)))
    yield Check("/health, p50", f"{_percentile(good, 50):.1f} ms")
    yield Check("/health, p99", f"{_percentile(good, 99):.1f} ms")
    yield at_most("/health, longest", good[-1], _MAX_DELAY * 1000, "ms", digits=1)


def _percentile(samples: Sequence[float], percent: int) -> float:
    return float(np.percentile(samples, percent, method="inverted_cdf"))


def fair(size: Size) -> Iterator[Check]:
    """Yield whether low-priority requests are served while others fill the server."""
    aging_rate = 1.0
    with Server(aging_rate=str(aging_rate)) as server:
        race = asyncio.run(
            fairness.race(
                server.address(),
                num_low=size.num_low,
                num_clients=4 * _NUM_SLOTS,
                num_slots=_NUM_SLOTS,
            )
        )
        low, high = (sorted(fairness.waits(outcomes)) for outcomes in (race.low, race.high))
        overtaken = [len(fairness.overtakers(race, outcome)) for outcome in race.low]
        yield Check(
            "requests of high priority", f"{len(high)}, waited {_percentile(high, 50):.2f} s (p50)"
        )
        yield Check(
            "requests of low priority", f"{len(low)}, waited {_percentile(low, 50):.2f} s (p50)"
        )
        yield Check("longest wait of a low one", f"{low[-1]:.2f} s")
        yield Check("overtaken by, on average", f"{sum(overtaken) / len(overtaken):.1f}")
        yield none_of(
            f"overtaken by one sent over {2 / aging_rate:g} s later",
            fairness.violations(race, aging_rate),
        )
        yield equal("not completed", sum(not o.is_complete for o in (*race.low, *race.high)), 0)
        yield from _end(server)


@dataclass(frozen=True, slots=True)
class Sample:
    """How the server stood at a time, in seconds since the end of the warm-up."""

    time: float
    resident: int
    num_files: int
    num_tokens: float


def long_run(size: Size) -> Iterator[Check]:
    """Yield whether a server stays as it is under a mixed load."""
    with Server(batch_block_pool_size=_SMALL_POOL, max_queued_requests="64") as server:
        address = server.address()
        texts = asyncio.run(mixed.reference_texts(address))
        num_files = num_open_files(server.pid)
        tally, samples = asyncio.run(_observe(server, address, size))
        yield Check("requests", f"{tally.num_requests} in {size.warm_up + size.long_time:.0f} s")
        yield none_of("requests that did not end well", tally.faults)
        yield from _flatness(samples)
        yield from _throughput(samples)
        yield from _what_is_left(server, num_files)
        yield _same_completions(address, texts)
        yield from _end(server)


async def _observe(
    server: Server, address: Address, size: Size
) -> tuple[mixed.Tally, list[Sample]]:
    """Keep the server busy, and look at it after the warm-up, until the time is over."""
    begin = monotonic() + size.warm_up
    end = begin + size.long_time
    samples: list[Sample] = []
    async with asyncio.TaskGroup() as group:
        load = group.create_task(mixed.crowd(address, _LONG_CLIENTS, lambda: monotonic() > end))
        due = begin
        while due <= end:
            await asyncio.sleep(due - monotonic())
            num_tokens = (await gauges(address))[_GENERATED]
            samples.append(
                Sample(
                    monotonic() - begin,
                    resident_bytes(server.pid),
                    num_open_files(server.pid),
                    num_tokens,
                )
            )
            due += _SAMPLE_INTERVAL
    return load.result(), samples


def _flatness(samples: Sequence[Sample]) -> Iterator[Check]:
    times = [s.time for s in samples]
    memory = trend(times, [s.resident for s in samples]).times(_HOUR / _MIB)
    files = trend(times, [float(s.num_files) for s in samples]).times(_HOUR)
    first, last = samples[0].resident / _MIB, samples[-1].resident / _MIB
    yield Check("resident memory, first and last", f"{first:.0f} and {last:.0f} MiB")
    yield _flat("resident memory", memory, _MAX_GROWTH, "MiB/h")
    yield Check("open files, least and most", _range([s.num_files for s in samples]))
    # They follow the connections of the moment: by chance some more at the end than at first.
    yield _flat("open files", files, 3 * files.standard_error, "/h")


def _flat(name: str, found: Trend, bound: float, unit: str) -> Check:
    value = f"{found.slope:+.2f} +- {found.standard_error:.2f} {unit}"
    return Check(f"{name}, slope", value, f"at most {bound:.1f} {unit}", found.slope <= bound)


def _range(values: Sequence[int]) -> str:
    return f"{min(values)} and {max(values)}"


def _throughput(samples: Sequence[Sample]) -> Iterator[Check]:
    """Compare the first and the last minute, or what there is of them."""
    width = min(_MINUTE, samples[-1].time / 2)
    first = _rate([s for s in samples if s.time <= samples[0].time + width + 1])
    last = _rate([s for s in samples if s.time >= samples[-1].time - width - 1])
    pairs = list(pairwise(samples))
    rates = trend([b.time for _, b in pairs], [_rate(pair) for pair in pairs]).times(_HOUR)
    yield Check("output of all of it", f"{_rate(samples):.1f} tokens/s")
    yield Check("output, slope", f"{rates.slope:+.2f} +- {rates.standard_error:.2f} tokens/s/h")
    yield Check("output, first and last minute", f"{first:.1f} and {last:.1f} tokens/s")
    ratio = last / first
    bound = f"at least {_MIN_THROUGHPUT_RATIO:g}"
    yield Check("output, last / first", f"{ratio:.3f}", bound, ratio >= _MIN_THROUGHPUT_RATIO)


def _rate(samples: Sequence[Sample]) -> float:
    first, last = samples[0], samples[-1]
    return (last.num_tokens - first.num_tokens) / (last.time - first.time)
