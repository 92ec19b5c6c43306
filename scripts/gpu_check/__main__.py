"""`python -m scripts.gpu_check --out FILE`: what is right on this GPU and how fast it is."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final

import mlx.core as mx

from scripts.gpu_check.checks import CHECKS, Check
from scripts.gpu_check.facts import device_facts
from scripts.gpu_check.processes import Outcome, run_all
from scripts.gpu_check.record import GOOD, Options
from scripts.gpu_check.report import markdown, verdict

_MINUTES: Final = 25.0
_NO_GPU: Final = (
    "no GPU that MLX can use is here; --device cpu --quick shows on a CPU that the check itself runs. On Linux "
    "DEVICE=cuda make gpu-check installs MLX for CUDA"
)


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Return 0 if nothing wrong was found, 1 if something was, and 2 if nothing could be checked."""
    args = _parser([check.name for check in checks]).parse_args(argv)
    if args.device == "gpu" and not mx.is_available(mx.gpu):
        print(_NO_GPU, file=sys.stderr)
        return 2
    out = Path(args.out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        print(f"--out: the report cannot be written: {error}", file=sys.stderr)
        return 2
    chosen = [check for check in checks if check.name in (args.only or check.name)]
    facts = device_facts(args.device)
    if args.quick:
        facts["sizes"] = "tiny (--quick): nothing here says how fast anything is"
    options = Options(device=args.device, is_quick=args.quick)
    began = monotonic()
    outcomes: list[Outcome] = []
    for outcome in run_all(chosen, options, args.minutes * 60):
        outcomes.append(outcome)
        print(f"{outcome.check.name:<12} {outcome.status:<10} {outcome.seconds:4.0f} s", flush=True)
        facts["duration"] = f"{monotonic() - began:.0f} s"
        # After each: what was found is there whatever happens next.
        out.write_text(markdown(facts, outcomes, len(chosen)), encoding="utf-8")
    print(f"{verdict(outcomes, len(chosen)).replace('**', '')}\nThe report is {out}")
    return int(any(outcome.status not in GOOD for outcome in outcomes))


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__)
    add = parser.add_argument
    add("--out", metavar="FILE", default="gpu-check.md", help="the report (default: %(default)s)")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu is for a dry run")
    add("--quick", action="store_true", help="tiny sizes, which show that everything runs")
    add(
        "--minutes",
        type=float,
        default=_MINUTES,
        metavar="N",
        help="for all (default: %(default)g)",
    )
    words = f"only this check; repeatable: {', '.join(names)}"
    add("--only", action="append", choices=names, metavar="CHECK", help=words)
    return parser


if __name__ == "__main__":
    sys.exit(main())
