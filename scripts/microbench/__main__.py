"""`python -m scripts.microbench [name ...]`: medians over repeats, and the tenths around them."""

import argparse
import json
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from batching.backend import BLAS
from batching.backend.loader import BUNDLED_MODEL
from batching.errors import ModelLoadError
from scripts.machine import describe, in_words
from scripts.microbench.constraints import run_constraints
from scripts.microbench.graph import run_graph
from scripts.microbench.kernels import run_attention, run_sampler
from scripts.microbench.products import run_products
from scripts.microbench.pure import run_blocks, run_scheduler
from scripts.microbench.steps import run_steps
from scripts.microbench.timing import FULL, QUICK, Pace, Result


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    benchmarks: dict[str, Callable[[Pace], Result]] = {
        "steps": partial(run_steps, args.model),
        "products": partial(run_products, args.model),
        "constraints": partial(run_constraints, args.model),
        "scheduler": run_scheduler,
        "blocks": run_blocks,
        "sampler": run_sampler,
        "attention": run_attention,
        "graph": run_graph,
    }
    if unknown := set(args.names) - benchmarks.keys():
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(benchmarks)}")
    machine = describe()
    print(f"{in_words(machine)}, BLAS: {BLAS}")
    results: dict[str, Result] = {}
    try:
        for name in args.names or benchmarks:
            results[name] = benchmarks[name](QUICK if args.quick else FULL)
            print(f"\n{name}\n{results[name]}", flush=True)
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json is not None:
        times = {name: [t.as_json() for t in r.timings] for name, r in results.items()}
        shares = dict(ChainMap(*(dict(r.shares) for r in results.values())))
        report = {"machine": machine, **times, "shares": shares}
        args.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.microbench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="what to time; default: all")
    parser.add_argument(
        "--model",
        default=BUNDLED_MODEL,
        help="of steps, products and constraints; default: %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
