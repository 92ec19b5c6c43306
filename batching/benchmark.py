"""Sequential against batched on the same engine: `python -m batching.benchmark --model M`.

Both runs serve the same requests through the same code; the sequential one has a single sequence slot.
Every prompt begins differently, so that no run finds another's prefix in the cache.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Final

import numpy as np
from tqdm import tqdm

from batching.backend.builder.engine import build_engine
from batching.backend_calls.build import Build
from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.errors import EngineError
from batching.inputs.sequence_spec import SequenceSpec
from batching.scheduler_manager import SchedulerManager

_TOPICS: Final = (
    "the history of bridges",
    "how bread rises",
    "a walk along a river",
    "why the sky is blue",
    "the rules of chess",
    "growing tomatoes",
    "a letter to a friend",
    "how clouds form",
)


@dataclass(frozen=True, slots=True)
class Report:
    """One run: counts, seconds, tokens per second, and the requests' latencies in seconds."""

    num_requests: int
    num_output_tokens: int
    duration: float
    throughput: float
    latency_avg: float
    latency_p50: float
    latency_p99: float

    @classmethod
    def of(cls, num_tokens: Sequence[int], latencies: Sequence[float], duration: float) -> "Report":
        p50, p99 = np.percentile(latencies, (50, 99), method="inverted_cdf").tolist()
        return cls(
            num_requests=len(latencies),
            num_output_tokens=sum(num_tokens),
            duration=duration,
            throughput=sum(num_tokens) / duration,
            latency_avg=sum(latencies) / len(latencies),
            latency_p50=p50,
            latency_p99=p99,
        )


def prompts(engine: AsyncEngine, num_requests: int, seed: int) -> list[list[int]]:
    """Return chat-like prompts of one length class, none the beginning of another."""
    rng = random.Random(seed)
    texts = [
        f"Request {rng.randrange(10**6)}: write about {_TOPICS[i % len(_TOPICS)]}, in detail."
        for i in range(num_requests)
    ]
    return [engine.model.tokenizer.encode(text) for text in texts]


async def measure(
    engine: AsyncEngine, token_ids: Sequence[Sequence[int]], max_tokens: int, title: str
) -> Report:
    """Serve all requests at once; each completion has exactly `max_tokens` tokens."""
    specs = [SequenceSpec(prompt=tuple(ids), max_tokens=max_tokens) for ids in token_ids]
    engine.check(specs)
    with tqdm(total=len(token_ids) * max_tokens, desc=title, unit="tok", file=sys.stderr) as bar:

        async def serve(spec: SequenceSpec) -> tuple[int, float]:
            num_tokens = 0
            stream = await engine.submit([spec])
            async for _, output in stream:
                num_tokens += len(output.token_ids)
                bar.update(len(output.token_ids))
            return num_tokens, perf_counter() - started

        started = perf_counter()
        served = await asyncio.gather(*map(serve, specs))
        duration = perf_counter() - started
    num_tokens, latencies = zip(*served, strict=True)
    return Report.of(num_tokens, latencies, duration)


def run(
    config: EngineConfig,
    num_requests: int,
    max_tokens: int,
    title: str,
    build: Build,
) -> Report:
    """Load the model, warm it up, and measure one run.

    Raises:
        EngineError: the model cannot be loaded, or the requests do not fit it.
    """
    manager = SchedulerManager([config], build)
    try:
        engine = manager.get(config.model_id)

        async def warm_up_and_measure() -> Report:
            await measure(engine, prompts(engine, config.max_num_seqs, 0), 4, f"{title}, warm-up")
            return await measure(engine, prompts(engine, num_requests, 1), max_tokens, title)

        return asyncio.run(warm_up_and_measure())
    finally:
        manager.close()


def table(sequential: Report, batched: Report, batch_size: int) -> str:
    """Return the two runs side by side."""
    rows = [
        ("requests", "num_requests", "d"),
        ("output tokens", "num_output_tokens", "d"),
        ("time, s", "duration", ".2f"),
        ("throughput, tok/s", "throughput", ".1f"),
        ("latency avg, s", "latency_avg", ".2f"),
        ("latency p50, s", "latency_p50", ".2f"),
        ("latency p99, s", "latency_p99", ".2f"),
    ]
    lines = [f"{'':<20}{'sequential':>12}{f'batch of {batch_size}':>14}"]
    for label, name, form in rows:
        left, right = (format(getattr(r, name), form) for r in (sequential, batched))
        lines.append(f"{label:<20}{left:>12}{right:>14}")
    lines.append(f"{'speedup':<20}{'':>12}{_speedup(sequential, batched):>13.2f}x")
    return "\n".join(lines)


def _speedup(sequential: Report, batched: Report) -> float:
    return batched.throughput / sequential.throughput


def main(argv: Sequence[str] | None = None, build: Build = build_engine) -> int:
    args = _parser().parse_args(argv)
    try:
        batched_config = EngineConfig(
            model=args.model,
            model_id=args.model,
            max_num_seqs=args.batch_size,
            max_num_batched_tokens=max(512, args.batch_size),
        )
        sequential_config = replace(batched_config, max_num_seqs=1)
        sequential = run(sequential_config, args.requests, args.max_tokens, "sequential", build)
        batched = run(batched_config, args.requests, args.max_tokens, "batched", build)
    except (EngineError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        report = {
            "model": args.model,
            "batch_size": args.batch_size,
            "max_tokens": args.max_tokens,
            "sequential": asdict(sequential),
            "batched": asdict(batched),
            "speedup": _speedup(sequential, batched),
        }
        print(json.dumps(report, indent=2))
    else:
        print(table(sequential, batched, args.batch_size))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m batching.benchmark", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, file or directory")
    parser.add_argument("--max-tokens", type=_count, default=100, help="tokens of each completion")
    parser.add_argument("--requests", type=_count, default=16)
    parser.add_argument("--batch-size", type=_count, default=16)
    parser.add_argument("--json", action="store_true", help="print numbers and no table")
    return parser


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a count")
    return number


if __name__ == "__main__":
    sys.exit(main())
