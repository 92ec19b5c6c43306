"""While a step begins, one of the threads that compute sleeps."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.builder import platforms
from batching.backend.builder.engine import build_engine
from batching.backend.platforms.cpu.native_loader import Native
from batching.batch_inference import BatchInferenceEngine
from batching.config import EngineConfig
from batching.inputs.sampling_params import GREEDY
from batching.request import BatchRequest
from tests.support.requests import make_request

# Temperature, top_k, top_p, min_p, top_n_sigma and seed.
ROW = (0.0, 1, 1.0, 0.0, 0.0, 0)


class Worker:
    """The second of two threads."""

    def __init__(self, thread: str) -> None:
        self._folder = Path("/proc/self/task", thread)
        if not (self._folder / "schedstat").exists():
            pytest.skip("this kernel does not tell how long a thread has run")

    @property
    def run_time(self) -> int:
        """Of a processor, in ns."""
        return int((self._folder / "schedstat").read_text(encoding="ascii").split()[0])

    def wait_until_it_sleeps(self) -> None:
        while "State:\tS" not in (self._folder / "status").read_text(encoding="ascii"):
            os.sched_yield()


@pytest.fixture
def worker(native: Native) -> Iterator[Worker]:
    if sys.platform != "linux":
        pytest.skip("threads are found in /proc")
    kernels = native.module
    kernels.set_num_threads(1)
    before = set(os.listdir("/proc/self/task"))
    kernels.set_num_threads(2)
    [thread] = set(os.listdir("/proc/self/task")) - before
    yield Worker(thread)
    kernels.lend_core_after_step(False)
    kernels.set_num_threads(native.num_threads)


class Product:
    """Of a row and weights that two threads divide."""

    def __init__(self, kernels: Any) -> None:
        rng = np.random.default_rng(3)
        weight = rng.standard_normal((2048, 512), dtype=np.float32)
        self._kernels, self._weights = kernels, kernels.pack(mx.array(weight))
        self._x = mx.array(rng.standard_normal((1, 512), dtype=np.float32))

    def __call__(self) -> list[float]:
        [y] = self._kernels.linear(self._x, [self._weights], [None])
        values: list[float] = y.reshape(-1).tolist()
        return values


def sample(kernels: Any) -> None:
    mx.eval(kernels.sample(mx.zeros((1, 8)), [ROW], [None], None))


def take_most_probable(kernels: Any) -> None:
    [logits] = kernels.linear(mx.ones((1, 32)), [kernels.pack(mx.ones((8, 32)))], [None])
    mx.eval(kernels.arg_max(logits))


@pytest.mark.parametrize("end_step", [sample, take_most_probable])
def test_a_core_is_lent_from_the_end_of_a_step_until_it_is_taken_back(
    native: Native, worker: Worker, end_step: Callable[[Any], None]
) -> None:
    kernels = native.module
    product = Product(kernels)
    expected = product()
    kernels.lend_core_after_step(True)
    end_step(kernels)
    worker.wait_until_it_sleeps()
    began = worker.run_time
    assert all(product() == expected for _ in range(100))
    assert worker.run_time == began
    kernels.take_core_back()
    while worker.run_time == began:
        assert product() == expected


def lend(kernels: Any) -> None:
    kernels.lend_core_after_step(True)
    sample(kernels)


def do_not(kernels: Any) -> None:
    kernels.lend_core_after_step(True)
    kernels.lend_core_after_step(False)
    sample(kernels)


def lend_for_one_step(kernels: Any) -> None:
    lend(kernels)
    kernels.take_core_back()
    sample(kernels)


def take_back_for_the_next_step(kernels: Any) -> None:
    lend(kernels)
    kernels.lend_core_after_step(False)


@pytest.mark.parametrize("before", [do_not, lend_for_one_step, take_back_for_the_next_step])
def test_a_core_that_is_not_lent_computes(
    native: Native, worker: Worker, before: Callable[[Any], None]
) -> None:
    product = Product(native.module)
    before(native.module)
    worker.wait_until_it_sleeps()
    began = worker.run_time
    while worker.run_time == began:
        product()


class Watched:
    """The extension, with what it was told: to lend a core or not when a step ends, and that one is waited for."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def lend_core_after_step(self, lends: bool) -> None:
        self.calls.append("lend" if lends else "do not")
        self._module.lend_core_after_step(lends)

    def take_core_back(self) -> None:
        self.calls.append("wait")
        self._module.take_core_back()


def engine_on(
    native: Native, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> BatchInferenceEngine:
    monkeypatch.setattr(platforms, "load_native", lambda *_: native)
    config = EngineConfig(model=str(directory), model_id="tiny", num_blocks=8, device="cpu")
    return build_engine(config).engine


def watched_engine(
    native: Native, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Watched, BatchInferenceEngine]:
    """Return an engine whose kernels lend a core, and what watches these."""
    watched = Watched(native.module)
    lending = replace(native, module=watched, lends_core=True)
    return watched, engine_on(lending, directory, monkeypatch)


def request_of(request_id: int, num_prompt_tokens: int) -> BatchRequest:
    prompt = [1 + (request_id + i) % 30 for i in range(num_prompt_tokens)]
    return make_request(request_id, prompt, max_tokens=4, sampling=GREEDY)


def generate(engine: BatchInferenceEngine, num_prompt_tokens: int) -> list[int]:
    request = request_of(0, num_prompt_tokens)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output_token_ids


def test_a_core_is_lent_before_each_queued_step(
    native: Native, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, engine = watched_engine(native, directory, monkeypatch)
    answer = generate(engine, 17)
    # A prompt, and three tokens, each queued while the step before it runs.
    steps = ["do not", "lend", "wait", "lend", "wait", "lend", "wait", "wait"]
    assert watched.calls == steps
    alone = replace(native, module=watched, lends_core=False)
    watched.calls.clear()
    assert generate(engine_on(alone, directory, monkeypatch), 17) == answer
    assert not watched.calls


def test_a_core_is_lent_before_a_step_that_reads_a_prompt(
    native: Native, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, engine = watched_engine(native, directory, monkeypatch)
    engine.add(request_of(0, 4))
    engine.step()
    engine.add(request_of(1, 17))
    while engine.has_work:
        engine.step()
    steps = ["do not", "lend", "wait", "lend", "wait", "lend", "wait"]
    assert watched.calls[: len(steps)] == steps


def test_all_cores_compute_while_copies_of_blocks_wait_for_a_step(
    native: Native, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, engine = watched_engine(native, directory, monkeypatch)
    generate(engine, 40)
    watched.calls.clear()
    # A stream, and a request that begins within the block that the first one left.
    engine.add(request_of(1, 4))
    engine.step()
    copying = request_of(0, 40)
    engine.add(copying)
    while engine.has_work:
        engine.step()
    assert copying.num_cached_tokens == 39
    # The second wait is the copy's, before its step is queued.
    assert watched.calls[:6] == ["do not", "lend", "wait", "wait", "lend", "wait"]
