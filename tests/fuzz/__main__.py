"""Fuzzes the targets, one after another; see `tests.fuzz`."""

import argparse
import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.fuzz.supervisor import Finding, run
from tests.fuzz.worker import Engine

_HERE: Final = Path(__file__).parent
_BUILD: Final = _HERE.parent.parent / "build" / "fuzz"
_SECONDS: Final = 600.0

TARGETS: Final = tuple(sorted(p.stem for p in (_HERE / "targets").glob("[!_]*.py")))


def corpus_of(target: str) -> list[Path]:
    return sorted((_HERE / "corpus" / target).iterdir())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="of all targets together")
    parser.add_argument(
        "--engine",
        choices=("atheris", "mutations"),
        default="atheris" if find_spec("atheris") else "mutations",
        help="atheris keeps the inputs that reach new branches; it is not for every system",
    )
    parser.add_argument("--replay", type=Path, action="append", metavar="FILE", help="only these")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"there is no target {min(unknown)}: {', '.join(TARGETS)}")
    return given


def main() -> int:
    given = arguments()
    targets = given.targets or TARGETS
    found = [_has_found(target, given, given.seconds / len(targets)) for target in targets]
    return 1 if any(found) else 0


def _has_found(target: str, given: argparse.Namespace, seconds: float) -> bool:
    """Run a target, and write what it wrote, and what it found."""
    engine: Engine = "replay" if given.replay else given.engine
    corpus = given.replay or corpus_of(target)
    seconds = 0.0 if given.replay else seconds
    done = run({f"tests.fuzz.targets.{target}": corpus}, engine, _BUILD / target, seconds=seconds)
    if isinstance(done, str):
        sys.stdout.write(f"{done}\n")
    else:
        kept = _kept(target, done.data)
        sys.stdout.write(f"{done.output}\n{target}: {done.reason}: {kept}\n\n")
    sys.stdout.flush()
    return isinstance(done, Finding)


def _kept(target: str, data: bytes) -> Path:
    """Keep an input for a replay, and for the corpus once its fault is repaired."""
    folder = _BUILD / "findings"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    sys.exit(main())
