"""`python -m scripts.make_model SHAPE OUT`."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from batching.backend.memory.device import device_memory
from scripts.make_model.k_types import MIX
from scripts.make_model.shapes import SHAPES, Shape
from scripts.make_model.weights import QUANTIZATIONS
from scripts.make_model.write import size_in_words, size_of, write_directory, write_gguf

_DESCRIPTION: Final = """\
Writes a model of random weights in the shape of a published configuration: as GGUF where OUT ends
in .gguf, otherwise as a directory that mlx-lm reads.  Nothing is downloaded; the tokenizer is the
bundled model's, with unused tokens up to the size of the vocabulary.  With --quantization bf16 a
directory's config.json also serves vLLM with --load-format dummy.
"""
# Two servers have the weights at a time where they are compared, each with a KV cache beside it.
_SHARE_OF_MEMORY: Final = 0.4


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    shape, out = SHAPES[args.shape], Path(args.out)
    if out.exists():
        parser.error(f"{out} exists")
    if not out.absolute().parent.is_dir():
        parser.error(f"there is no directory {out.absolute().parent}")
    if args.quantization == MIX and out.suffix != ".gguf":
        parser.error(f"only GGUF files are {MIX}")
    if args.quantization is not None:
        shape = replace(shape, quantization=args.quantization, of_experts=args.quantization)
    most = shape.config["num_hidden_layers"]
    if args.layers is not None and not shape.least_layers <= args.layers <= most:
        parser.error(f"{args.shape} has {shape.least_layers} to {most} layers, not {args.layers}")
    shape = shape.with_layers(args.layers or layers_that_fit(shape, device_memory()))
    started = time.monotonic()
    try:
        (write_gguf if out.suffix == ".gguf" else write_directory)(shape, out)
    except BaseException:
        # Half a model looks like a whole one.
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        raise
    print(
        f"{out}: {args.shape}, {shape.config['num_hidden_layers']} of {most} layers, "
        f"{size_in_words(size_of(shape))}, {time.monotonic() - started:.0f} s"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.make_model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", metavar="SHAPE", choices=SHAPES, help=", ".join(SHAPES))
    parser.add_argument("out", metavar="OUT", help="a new file or directory")
    words = "default: as many as take two fifths of the memory at most"
    parser.add_argument("--layers", type=int, metavar="N", help=words)
    words = "of all matrices; default: q4_0, for gpt-oss-20b mxfp4 in experts and q8_0 elsewhere"
    parser.add_argument("--quantization", choices=(*QUANTIZATIONS, MIX), help=words)
    return parser


def layers_that_fit(shape: Shape, memory: int) -> int:
    """Return as many layers as leave room for a second server and for the KV caches."""
    least, most = shape.least_layers, shape.config["num_hidden_layers"]
    of_least = size_of(shape.with_layers(least))
    of_others = size_of(shape) - of_least
    room = _SHARE_OF_MEMORY * memory - of_least
    return int(max(least, min(most, least + room * (most - least) / max(1, of_others))))


if __name__ == "__main__":
    sys.exit(main())
