"""What LoRA adapters cost.

`python -m scripts.bench.adapters rows [--model M] [--rank 8] [--layers 16]` decodes 16 streams at once: without
adapters, with one, and with four; the runs alternate, and medians are compared.  Adapters are random, for all linear
layers of the last `--layers` layers (0: of all), as mlx-lm makes them.

`python -m scripts.bench.adapters slots [--adapters 100] [--slots 8]` sends requests whose adapters are drawn by Zipf's law (exponent 1),
and then the same requests without adapters: hits, loads, and how long requests wait for their first token.

`python -m scripts.bench.adapters flood [--slots 1]` has 24 clients with one adapter, and one with another.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

from batching.adapters.adapter import AdaptableLayers
from batching.adapters.files.adapter_file import AdapterFile
from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_files.references import BUNDLED_MODEL
from scripts.make_model.adapters import random_matrices, write_adapter

_NUM_STREAMS: Final = 16
_NUM_TOKENS: Final = 96
_PROMPT_TOKENS: Final = 32
_NUM_OTHERS: Final = 12


class Served(NamedTuple):
    """A request that has been served: seconds to its first token, and to its last."""

    first: float
    last: float


def adapters(
    engine: AsyncEngine, folder: Path, count: int, rank: int, num_last: int
) -> list[AdapterFile]:
    layers = engine.model.adapters
    if not isinstance(layers, AdaptableLayers):
        sys.exit(f"the model {layers.reason}")
    files = []
    for seed in range(count):
        matrices = random_matrices(layers, rank, seed, num_last=num_last)
        files.append(AdapterFile(write_adapter(folder / f"a{seed}", matrices), f"a{seed}"))
    return files


def specs(count: int, seed: int, num_tokens: int, vocab_size: int) -> list[SequenceSpec]:
    """Return requests with random prompts, which end at their limit."""
    prompts = np.random.default_rng(seed).integers(3, vocab_size, (count, _PROMPT_TOKENS))
    return [SequenceSpec(prompt=tuple(map(int, each)), max_tokens=num_tokens) for each in prompts]


async def serve(engine: AsyncEngine, spec: SequenceSpec) -> Served:
    began, first = perf_counter(), 0.0
    async for _ in await engine.submit([spec]):
        first = first or perf_counter() - began
    return Served(first, perf_counter() - began)


async def serve_all(engine: AsyncEngine, queue: Iterator[SequenceSpec]) -> list[Served]:
    return [await serve(engine, spec) for spec in queue]


async def measure_rows(engine: AsyncEngine, files: Sequence[AdapterFile], rounds: int) -> None:
    """Print tokens per second without adapters, with one, and with all of them; in turns."""
    kinds: dict[str, list[AdapterFile | None]] = {
        "no adapter": [None],
        "one adapter": [files[0]],
        f"{len(files)} adapters": [*files],
        f"{len(files)} adapters and none": [*files, None],
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, used in kinds.items():
            plain = specs(_NUM_STREAMS, number, _NUM_TOKENS, engine.model.vocab_size)
            given = [
                replace(spec, adapter=None if file is None else file.adapter)
                for i, spec in enumerate(plain)
                for file in [used[i % len(used)]]
            ]
            began = perf_counter()
            await asyncio.gather(*(serve(engine, spec) for spec in given))
            seconds = perf_counter() - began
            if number:
                speeds[kind].append(_NUM_STREAMS * _NUM_TOKENS / seconds)
    alone = speeds["no adapter"]
    for kind, values in speeds.items():
        ratio = median(v / base for v, base in zip(values, alone, strict=True))
        print(f"{kind}: {median(values):.0f} tokens/s, {ratio:.3f} of those without")


async def measure_slots(engine: AsyncEngine, files: Sequence[AdapterFile], count: int) -> None:
    """Print what becomes of requests for many adapters, of which a few are asked for most."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, len(files) + 1)
    drawn = [files[each] for each in rng.choice(len(files), count, p=weights / weights.sum())]
    plain = specs(count, 1, 24, engine.model.vocab_size)
    for title, given in (
        ("without adapters", plain),
        ("with", [replace(s, adapter=f.adapter) for s, f in zip(plain, drawn, strict=True)]),
    ):
        before, began = await engine.stats(), perf_counter()
        # A few more clients than fit into the batch, each with a request after the other.
        queue = iter(given)
        clients = (serve_all(engine, queue) for _ in range(12))
        served = [each for some in await asyncio.gather(*clients) for each in some]
        seconds, after = perf_counter() - began, await engine.stats()
        hits = after.num_adapter_hits - before.num_adapter_hits
        loads = after.num_adapter_loads - before.num_adapter_loads
        p50, p99 = np.percentile([each.first for each in served], (50, 99))
        found = f", hits {hits / (hits + loads):.2f}, {loads} loads" if loads else ""
        print(
            f"{title}: {len(served)} requests in {seconds:.1f} s, first token p50 {p50:.2f} s, "
            f"p99 {p99:.2f} s{found}"
        )


async def measure_flood(engine: AsyncEngine, files: Sequence[AdapterFile], count: int) -> None:
    """Print how long one adapter's requests wait beside a flood of another's, and beside one without adapters."""
    of_flood = specs(count, 1, 24, engine.model.vocab_size)
    for title, flood, other in (
        ("both without adapters", None, None),
        ("each with its own", files[0].adapter, files[1].adapter),
    ):
        queue = iter([replace(spec, adapter=flood) for spec in of_flood])
        flooding = asyncio.gather(*(serve_all(engine, queue) for _ in range(24)))
        mine = [
            (await serve(engine, replace(spec, adapter=other))).first
            for spec in specs(_NUM_OTHERS, 2, 4, engine.model.vocab_size)
        ]
        of_others = [each.first for some in await flooding for each in some]
        print(
            f"{title}: first token p50 {median(mine):.2f} s, longest {max(mine):.2f} s; "
            f"of the flood p50 {median(of_others):.2f} s, longest {max(of_others):.2f} s"
        )


async def run(args: argparse.Namespace) -> None:
    config = EngineConfig(
        model=args.model,
        model_id="base",
        max_num_seqs=_NUM_STREAMS if args.what == "rows" else 8,
        max_adapters=args.slots,
        max_adapter_rank=args.rank,
        max_draft_tokens=0,
    )
    engine = AsyncEngine(lambda slices: build_engine(config, slices))
    await asyncio.to_thread(engine.start)
    try:
        with tempfile.TemporaryDirectory() as folder:
            count = args.adapters if args.what == "slots" else 4
            files = adapters(engine, Path(folder), count, args.rank, args.layers)
            print(f"{files[0].num_bytes / 2**20:.1f} MiB an adapter")
            if args.what == "rows":
                await measure_rows(engine, files, args.rounds)
            elif args.what == "slots":
                await measure_slots(engine, files, args.requests)
            else:
                await measure_flood(engine, files, args.requests)
    finally:
        await asyncio.to_thread(engine.stop, 60)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.adapters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("rows", "slots", "flood"))
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16, help="the last ones; 0: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--requests", type=int, default=600)
    asyncio.run(run(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
