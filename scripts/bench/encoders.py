"""Texts a second of an encoder's engine beside sentence-transformers, on as many threads of the same CPU.

    python -m scripts.bench.encoders                     # the shapes MiniLM-L6 and BERT-base, random weights
    python -m scripts.bench.encoders --torch PYTHON      # beside sentence-transformers in that environment

Both get the same directory and the same token counts; they alternate, and medians are compared.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.inputs.sequence_spec import SequenceSpec
from batching.pooling import PoolingParams, PoolingType
from batching.request import BatchRequest
from scripts.make_model.encoders import SHAPES, words, write_model

# Runs in the other environment: encodes all texts for each line of its input, and says how long it took.
_OTHER: Final = """
import json, sys, time, torch
from sentence_transformers import SentenceTransformer
folder, threads, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
texts = json.loads(sys.stdin.readline())
model = SentenceTransformer(folder, device="cpu")
for line in sys.stdin:
    began = time.perf_counter()
    model.encode(texts, batch_size=batch, show_progress_bar=False)
    print(time.perf_counter() - began, flush=True)
"""


def make_texts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[str]:
    """Return texts of words, most of them short."""
    rng, known = random.Random(seed), words()
    low, high = lengths
    counts = [low + int((high - low) * rng.random() ** 2) for _ in range(count)]
    return [" ".join(rng.choices(known, k=n)) for n in counts]


def ours(folder: Path, texts: Sequence[str], threads: int) -> Callable[[], float]:
    """Return what lets our engine embed all texts, from text to vectors, and returns the seconds."""

    loaded = build_engine(
        EngineConfig(model=str(folder), model_id="bench", device="cpu", cpu_threads=threads)
    )
    pooling = PoolingParams(type=PoolingType.MEAN, normalize=False)

    def run() -> float:
        began = perf_counter()
        for index, text in enumerate(texts):
            prompt = tuple(loaded.model.tokenizer.encode(text))
            spec = SequenceSpec(prompt=prompt, max_tokens=0, pooling=pooling)
            loaded.engine.add(BatchRequest(index, spec))
        while loaded.engine.has_work:
            loaded.engine.step()
        return perf_counter() - began

    return run


def theirs(python: str, folder: Path, texts: Sequence[str], threads: int) -> Callable[[], float]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [python, "-c", _OTHER, str(folder), str(threads), "32"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    stdin.write(json.dumps(texts) + "\n")

    def run() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    return run


def measure(name: str, arguments: argparse.Namespace) -> None:
    texts = make_texts(arguments.texts, tuple(arguments.lengths))
    with TemporaryDirectory() as directory:
        folder = write_model(Path(directory), SHAPES[name])
        runs = {"engine": ours(folder, texts, arguments.threads)}
        if arguments.torch:
            runs["sentence-transformers"] = theirs(
                arguments.torch, folder, texts, arguments.threads
            )
        for run in runs.values():
            run()
        seconds: dict[str, list[float]] = {each: [] for each in runs}
        for _ in range(arguments.rounds):
            for each, run in runs.items():
                seconds[each].append(run())
    medians = {each: statistics.median(times) for each, times in seconds.items()}
    for each, median in medians.items():
        ratio = f", {median / medians['engine']:.2f} x the time" if each != "engine" else ""
        print(f"{name}: {each} {len(texts) / median:.1f} texts/s{ratio}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has the other one")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--lengths", type=int, nargs=2, default=(5, 250), metavar=("LOW", "HIGH"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    for name in arguments.shape or SHAPES:
        measure(name, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
