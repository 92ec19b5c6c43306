"""A server under a mixed load for a long time, and whether it stays as it is."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Final

from scripts.server_process import (
    Address,
    Server,
    num_open_files,
    resident_bytes,
    wait_until,
)
from scripts.soak import mixed
from scripts.soak.checks import Check, Trend, at_most, equal, none_of, trend
from scripts.soak.gauges import gauges, held

_MIB: Final = float(1 << 20)
_HOUR: Final = 3600.0
_MINUTE: Final = 60.0
# Seconds between two samples of a long run.
_SAMPLE_INTERVAL: Final = 5.0
# A pool so small that it is full, and evicts and preempts, before the warm-up ends.
_SMALL_POOL: Final = "192"
_LONG_CLIENTS: Final = 16
_MIN_THROUGHPUT_RATIO: Final = 0.95
# MiB an hour; one kilobyte that each request leaves behind is about 10.
_MAX_GROWTH: Final = 20.0
_GENERATED: Final = "vllm:generation_tokens_total"


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


@dataclass(frozen=True, slots=True)
class Sample:
    """How the server stood at a time, in seconds since the end of the warm-up."""

    time: float
    resident: int
    num_files: int
    num_tokens: float


def long_run(seconds: float, warm_up: float) -> Iterator[Check]:
    """Yield whether a server stays as it is for some seconds after those of a warm-up."""
    with Server(num_blocks=_SMALL_POOL, max_queued_requests="64") as server:
        address = server.address()
        texts = asyncio.run(mixed.reference_texts(address))
        num_files = num_open_files(server.pid)
        tally, samples = asyncio.run(_observe(server, address, seconds, warm_up))
        yield Check("requests", f"{tally.num_requests} in {warm_up + seconds:.0f} s")
        yield none_of("requests that did not end well", tally.faults)
        yield from _flatness(samples)
        yield from _throughput(samples)
        yield from _what_is_left(server, num_files)
        are_same = asyncio.run(mixed.reference_texts(address)) == texts
        yield equal("later completions are the same", are_same, True)
        yield equal("exit status", server.stop(), 0)
        yield equal("tracebacks in the log", server.log.count("Traceback"), 0)


async def _observe(
    server: Server, address: Address, seconds: float, warm_up: float
) -> tuple[mixed.Tally, list[Sample]]:
    """Keep the server busy, and look at it after the warm-up, until the time is over."""
    begin = monotonic() + warm_up
    end = begin + seconds
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
