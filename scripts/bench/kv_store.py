"""What keys and values on disk save and cost.

`python -m scripts.bench.kv_store` serves a model without HTTP: the bundled one, or `--model`.  It prints the time to the
first token of a long prompt that is computed, that is read in the next life of the engine with the files in the page cache, and
without; and the throughput of new prompts with and without writing behind, in turns.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter
from typing import Final

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.sampling_params import SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_files.references import BUNDLED_MODEL
from batching.request import BatchRequest
from batching.steps.stats import StoreUse

_MIB: Final = 1 << 20
_NUM_OUTPUT: Final = 8
# Of the traffic whose throughput is measured.
_NUM_PROMPTS: Final = 6
_PROMPT_TOKENS: Final = 700
_ANSWER_TOKENS: Final = 60


def engine_of(model: str, folder: Path | None, num_blocks: int) -> LoadedEngine:
    config = EngineConfig(model=model, model_id="bench", num_blocks=num_blocks, kv_cache_dir=folder)
    return build_engine(config)


def prompt_of(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + i * 31) % 20_000 + 100 for i in range(num_tokens))


def add(engine: LoadedEngine, request_id: int, prompt: Sequence[int], max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0)
    spec = SequenceSpec(prompt=tuple(prompt), max_tokens=max_tokens, sampling=sampling)
    engine.engine.add(BatchRequest(request_id, spec, arrival_time=perf_counter()))


def first_token(engine: LoadedEngine, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token of a prompt, and the tokens."""
    has_read = Event()
    if engine.store is not None:
        engine.store.call_when_read(has_read.set)
    add(engine, 0, prompt, _NUM_OUTPUT)
    began, seconds = perf_counter(), 0.0
    tokens: list[int] = []
    while engine.engine.has_work:
        # As the thread of a server: one that looks again and again keeps the reader from Python.
        if not engine.engine.can_step:
            assert has_read.wait(60), "nothing was read"
            has_read.clear()
            engine.engine.go_on()
        for item in engine.engine.step():
            tokens += item.output.token_ids  # type: ignore[union-attr]
            seconds = seconds or (perf_counter() - began) * bool(tokens)
    return seconds, tokens


def tokens_per_second(engine: LoadedEngine, seed: int) -> float:
    """Return the throughput of new prompts and their answers, those that wait to be stored included."""
    for i in range(_NUM_PROMPTS):
        add(engine, seed * 100 + i, prompt_of(_PROMPT_TOKENS, seed * 100 + i), _ANSWER_TOKENS)
    began = perf_counter()
    while engine.engine.has_work:
        engine.engine.step()
    return _NUM_PROMPTS * (_PROMPT_TOKENS + _ANSWER_TOKENS) / (perf_counter() - began)


def save_all(engine: LoadedEngine) -> None:
    while engine.engine.will_step:
        if engine.engine.can_step:
            engine.engine.step()
        elif engine.store is not None:
            engine.store.flush()


def leave_page_cache(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*.*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_reading(model: str, num_tokens: int, num_times: int, folder: Path) -> None:
    prompt, num_blocks = prompt_of(num_tokens, 1), num_tokens // 32 + 8
    engine = engine_of(model, folder, num_blocks)
    computed, expected = first_token(engine, prompt)
    save_all(engine)
    engine.close()
    print(f"{num_tokens} tokens, computed: {computed:.2f} s")
    for name, is_cold in (("warm", False), ("cold", True)):
        found: list[float] = []
        for _ in range(num_times):
            engine = engine_of(model, folder, num_blocks)
            if is_cold:
                leave_page_cache(folder)
            seconds, tokens = first_token(engine, prompt)
            assert tokens == expected
            use = engine.engine.stats().store or StoreUse()
            found.append(seconds)
            engine.close()
            read = f"{use.num_restored_tokens} tokens in {use.bytes_read // _MIB} MiB"
        print(
            f"{name}: {median(found):.2f} s, {computed / median(found):.0f} times as fast; {read}"
        )


def measure_writing(model: str, num_times: int, folder: Path) -> None:
    num_blocks = 4 * _NUM_PROMPTS * (_PROMPT_TOKENS + _ANSWER_TOKENS) // 32
    engines = engine_of(model, None, num_blocks), engine_of(model, folder, num_blocks)
    rates: tuple[list[float], list[float]] = [], []
    for i in range(num_times):
        for engine, found in zip(engines, rates, strict=True):
            found.append(tokens_per_second(engine, i))
            save_all(engine)
    without, written = map(median, rates)
    print(
        f"new prompts: {without:.0f} tokens/s, and {written:.0f} while they are stored: {written / without - 1:+.1%}"
    )
    for engine in engines:
        engine.close()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--writing-times", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory(dir=chosen.folder) as temporary:
        measure_reading(chosen.model, chosen.tokens, chosen.times, Path(temporary, "read"))
        if chosen.writing_times:
            measure_writing(chosen.model, chosen.writing_times, Path(temporary, "write"))


if __name__ == "__main__":
    main(sys.argv[1:])
