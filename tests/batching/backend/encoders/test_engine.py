"""Encoders in the engine of all models: whole texts, in the order of the queue, beside other models."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.adapters.adapter import NoAdapters
from batching.backend.builder.engine import build_engine
from batching.backend.encoders import ragged
from batching.backend_calls.machine import this_machine
from batching.batch_inference import BatchInferenceEngine
from batching.config import EngineConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.sequence_spec import SequenceSpec
from batching.models.needs import memory_need
from batching.pooling import PoolingParams, PoolingType
from batching.priority_queue import Priority
from batching.request import BatchRequest
from batching.scheduler_manager import SchedulerManager
from batching.scheduling.outputs import RequestFailure
from tests.support.encoder_files import write_cross_encoder, write_encoder
from tests.support.encoder_models import CONFIGS
from tests.support.model_files import write_model

NATIVE = pytest.mark.parametrize("native", ["auto", "off"])


def config_of(directory: Path, **settings: Any) -> EngineConfig:
    chosen: dict[str, Any] = {"model_id": "tiny", "device": "cpu", "num_blocks": 8} | settings
    return EngineConfig(model=str(directory), **chosen)


@contextmanager
def loaded(directory: Path, **settings: Any) -> Iterator[LoadedEngine]:
    engine = build_engine(config_of(directory, **settings))
    try:
        yield engine
    finally:
        engine.close()


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(9, 96, length).tolist())


def request(request_id: int, prompt: tuple[int, ...], **fields: Any) -> BatchRequest:
    pooling = PoolingParams(type=PoolingType.MEAN)
    spec = SequenceSpec(prompt=prompt, max_tokens=0, pooling=pooling, **fields)
    return BatchRequest(request_id, spec)


def run(engine: BatchInferenceEngine) -> dict[int, Any]:
    """Run all requests; return what becomes of each, in the order in which they end."""
    ended: dict[int, Any] = {}
    while engine.has_work:
        for item in engine.step():
            if isinstance(item, RequestFailure):
                ended[item.request_id] = item.error
            else:
                ended[item.request_id] = item.output.embedding
    return ended


@NATIVE
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_text_has_the_same_vector_alone_and_among_others(
    tmp_path: Path, kind: str, native: str
) -> None:
    lengths = (96, 1, 17, 96, 40, 17, 96, 33, 2)
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    with loaded(write_encoder(tmp_path, kind), native=native, max_num_batched_tokens=64) as engine:
        alone = []
        for each in texts:
            engine.engine.add(request(0, each))
            alone.append(run(engine.engine)[0])
        engine.engine.add(*(request(i, each) for i, each in enumerate(texts)))
        together = run(engine.engine)
        assert engine.engine.stats().num_free_blocks == engine.engine.stats().num_blocks
    for i, vector in enumerate(alone):
        assert together[i] == pytest.approx(vector, abs=1e-6)
        if native == "auto":
            assert together[i] == vector


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_long_texts_are_attended_in_parts(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(write_encoder(tmp_path, kind), native="off") as engine:
        engine.engine.add(request(0, text(90)))
        whole = run(engine.engine)[0]
        monkeypatch.setattr(ragged, "_MAX_QUERIES", 11)
        engine.engine.add(request(0, text(90)))
        assert run(engine.engine)[0] == pytest.approx(whole, abs=1e-6)


def test_texts_are_read_whole_in_the_order_of_their_classes(tmp_path: Path) -> None:
    with loaded(write_encoder(tmp_path, "bert"), max_num_batched_tokens=64) as loaded_engine:
        engine = loaded_engine.engine
        # All of them run at a time: so many have 16 tokens each in a step.
        engine.add(*(request(i, text(90)) for i in range(6)))
        engine.add(request(6, text(5), priority=Priority.HIGH))
        engine.add(request(7, text(90)))
        engine.abort(7)
        first = [item.request_id for item in engine.step()]
        assert 6 in first
        engine.abort(5)
        assert sorted([*first, *run(engine)]) == [0, 1, 2, 3, 4, 6]
        assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_a_text_that_overflows_fails_alone(tmp_path: Path) -> None:
    with loaded(write_encoder(tmp_path, "bert"), native="off") as loaded_engine:
        engine = loaded_engine.engine
        runner: Any = engine._runner
        weight = runner._encoder.plain.embeddings.word_embeddings.weight
        weight[95] = float("nan")
        engine.add(request(0, (9, 10)), request(1, (9, 95)), request(2, (11,)))
        ended = run(engine)
    assert isinstance(ended[1], Exception)
    assert len(ended[0]) == len(ended[2]) == 48


@pytest.mark.anyio
async def test_an_encoder_a_reranker_and_a_chat_model_share_a_process(tmp_path: Path) -> None:
    folders = {
        "vectors": write_encoder(tmp_path / "vectors", "modernbert"),
        "scores": write_cross_encoder(tmp_path / "scores", "xlm-roberta"),
        "chat": write_model(tmp_path / "chat"),
    }
    manager = SchedulerManager(
        [config_of(folder, model_id=name, num_blocks=None) for name, folder in folders.items()]
    )
    try:
        leases = {name: manager.request(name, 0.0) for name in folders}
        engines = {
            name: (await asyncio.wrap_future(lease.future)).engine for name, lease in leases.items()
        }
        specs = {
            "vectors": request(0, text(60)).spec,
            "scores": request(0, text(20)).spec,
            "chat": SequenceSpec(prompt=(1, 2, 3), max_tokens=20),
        }
        streams = [await engines[name].submit([spec] * 4) for name, spec in specs.items()]
        sizes = []
        for stream in streams:
            outputs = [output async for _, output in stream]
            sizes.append({len(output.embedding or ()) for output in outputs})
        assert sizes == [{48}, {1}, {0}]
        config = config_of(folders["vectors"], num_blocks=None)
        need = memory_need(config, this_machine(config))
        assert need is not None
        # The files have a layer that is not used, the pooler.
        used = engines["vectors"].memory.total
        assert used <= need.least < 1.2 * used
        for lease in leases.values():
            lease.close()
    finally:
        manager.close()


def test_encoders_take_no_adapters(tmp_path: Path) -> None:
    with loaded(write_encoder(tmp_path, "bert"), max_adapters=2) as engine:
        assert engine.model.adapters == NoAdapters("is an encoder, which takes no adapters")
