"""`python -m scripts.bench.engine IN`: the lines of a batch on the engine alone, without a server.

Loads the model with the MLX_SERVER_* settings of the environment, queues the prompts of all lines at
once and takes steps until each has its tokens.  Prints the seconds of these steps.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from app.settings import Settings
from batching.backend.engine_builder import build_engine
from batching.batch_inference import BatchInferenceEngine
from batching.inputs.sampling_params import GREEDY
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.engine", description=__doc__)
    parser.add_argument(
        "lines", type=Path, metavar="IN", help="chat completions, greedy and without end"
    )
    path = parser.parse_args(argv).lines
    loaded = build_engine(Settings().engine_config())
    tokenizer = loaded.model.tokenizer
    requests = []
    for number, body in enumerate(_bodies(path)):
        token_ids = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        requests.append(
            BatchRequest(
                number,
                SequenceSpec(
                    prompt=tuple(token_ids), max_tokens=body["max_tokens"], sampling=GREEDY
                ),
            )
        )
    print(_seconds(loaded.engine, requests))
    return 0


def _bodies(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["body"]


def _seconds(engine: BatchInferenceEngine, requests: Sequence[BatchRequest]) -> float:
    began = perf_counter()
    engine.add(*requests)
    while engine.has_work:
        engine.step()
    return perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
