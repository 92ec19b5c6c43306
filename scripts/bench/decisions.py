"""How well `/v1/decisions` is calibrated, and what many questions cost.

`python -m scripts.bench.decisions [--url URL]` asks a server, or one of its own, sixty easy questions of
true or false, and reports the accuracy, the mean probability of the chosen answer, and the expected calibration error
(Naeini et al. 2015) over five bins.  Then it measures 400 questions about one input in one call, 100 of them in calls of
their own, one after another, and prompts that have as many tokens together as the one call has.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import httpx
import numpy as np

from scripts.server_process import Server

_TRUE: Final = (
    "Water freezes at 0 degrees Celsius.",
    "Paris is the capital of France.",
    "The sun is a star.",
    "A triangle has three sides.",
    "Fish live in water.",
    "Two plus two is four.",
    "The moon goes around the earth.",
    "Ice is cold.",
    "A week has seven days.",
    "Dogs are animals.",
    "Fire is hot.",
    "London is in England.",
    "Birds have feathers.",
    "A year has twelve months.",
    "Snow is white.",
    "Bees make honey.",
    "Humans need oxygen.",
    "Grass is green.",
    "Tokyo is in Japan.",
    "Spiders have eight legs.",
    "Gold is a metal.",
    "Ten is more than five.",
    "Cows give milk.",
    "The heart pumps blood.",
    "Sugar is sweet.",
    "Apples grow on trees.",
    "An hour has sixty minutes.",
    "Sharks live in the sea.",
    "Rome is the capital of Italy.",
    "The earth is round.",
)
_FALSE: Final = (
    "Water freezes at 90 degrees Celsius.",
    "Paris is the capital of Germany.",
    "The sun is a planet.",
    "A triangle has five sides.",
    "Fish live in the clouds.",
    "Two plus two is nine.",
    "The sun goes around the moon.",
    "Ice is hot.",
    "A week has three days.",
    "Dogs are plants.",
    "Fire is cold.",
    "London is in Brazil.",
    "Birds have wheels.",
    "A year has forty months.",
    "Snow is black.",
    "Bees make cheese.",
    "Humans breathe gold.",
    "Grass is blue.",
    "Tokyo is in Canada.",
    "Spiders have two legs.",
    "Gold is a fruit.",
    "Five is more than ten.",
    "Cows lay eggs.",
    "The heart digests food.",
    "Sugar is bitter.",
    "Apples grow under the sea.",
    "An hour has ten minutes.",
    "Sharks live in the desert.",
    "Rome is the capital of Spain.",
    "The earth is a cube.",
)
_INPUT: Final = "You know the world well. Judge each statement by common knowledge."
_SENTENCE: Final = (
    "The order was late, the box was damaged, and the customer wants the money back. "
)
_NUM_QUESTIONS: Final = 400
_NUM_SINGLE: Final = 100
_NUM_BINS: Final = 5
_PROMPT: Final = 1000
_TIMEOUT: Final = 1200.0


class Calibration(NamedTuple):
    """`error` is the expected calibration error; all are shares."""

    accuracy: float
    mean_probability: float
    error: float


def calibration(probabilities: Sequence[float], truths: Sequence[bool]) -> Calibration:
    """Compare probabilities of true with what is true."""
    p = np.array(probabilities)
    is_chosen = p >= 0.5
    chosen = np.where(is_chosen, p, 1 - p)
    is_right = is_chosen == np.array(truths)
    bins = np.minimum(((chosen - 0.5) * 2 * _NUM_BINS).astype(int), _NUM_BINS - 1)
    gaps = [abs(chosen[bins == b].sum() - is_right[bins == b].sum()) for b in range(_NUM_BINS)]
    return Calibration(
        float(is_right.mean()), float(chosen.mean()), float(np.sum(gaps)) / len(probabilities)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.decisions")
    parser.add_argument("--url", help="a server; one is started if left out")
    parser.add_argument("--sentences", type=int, default=100, help="of the input of 400 questions")
    options = parser.parse_args(argv)
    if options.url is not None:
        _measure(options.url, options.sentences)
        return 0
    with Server() as server:
        _measure(server.url, options.sentences)
    return 0


def _measure(url: str, num_sentences: int) -> None:
    with httpx.Client(base_url=url, timeout=_TIMEOUT) as client:
        answers = _post(client, _INPUT, [*map(_predicate, (*_TRUE, *_FALSE))])["answers"]
        truths = [True] * len(_TRUE) + [False] * len(_FALSE)
        print(calibration([a["probability"] for a in answers], truths))
        text = _SENTENCE * num_sentences
        asked = [_predicate(f"Is this about matter {i}?") for i in range(_NUM_QUESTIONS)]
        usage = _timed(client, "400 questions in one call", f"one {text}", asked)
        start = time.perf_counter()
        for each in asked[:_NUM_SINGLE]:
            _post(client, f"two {text}", [each])
        print(f"{_NUM_SINGLE} calls, one after another: {time.perf_counter() - start:.1f} s")
        length = usage["input_tokens"]
        prompts = [[300 + i] * _PROMPT for i in range(length // _PROMPT)]
        start = time.perf_counter()
        body = {"prompt": prompts, "max_tokens": 1}
        client.post("/v1/completions", json=body).raise_for_status()
        seconds = time.perf_counter() - start
        print(f"{len(prompts)} prompts of {_PROMPT} tokens: {seconds:.1f} s")


def _timed(client: httpx.Client, what: str, text: str, asked: Sequence[dict[str, str]]) -> Any:
    start = time.perf_counter()
    usage = _post(client, text, asked)["usage"]
    print(f"{what}: {time.perf_counter() - start:.1f} s, {json.dumps(usage)}")
    return usage


def _predicate(text: str) -> dict[str, str]:
    return {"type": "predicate", "instructions": text}


def _post(client: httpx.Client, text: str, questions: Sequence[dict[str, str]]) -> Any:
    response = client.post("/v1/decisions", json={"input": text, "questions": questions})
    response.raise_for_status()
    return response.json()


if __name__ == "__main__":
    raise SystemExit(main())
