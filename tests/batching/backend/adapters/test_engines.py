"""Engines with adapters of files, held against engines of the merged weights."""

import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from mlx_lm.models import qwen3

from batching.adapters.adapter import NO_ADAPTERS, AdaptableLayers, Adapter, NoAdapters
from batching.adapters.files.adapter_file import AdapterFile
from batching.backend.adapters.survey import survey
from batching.backend.builder.adapters import AdaptedModel, OpenAdapters, open_adapters
from batching.backend.builder.engine import build_engine
from batching.backend.devices import Gpu
from batching.backend.hooks.changes import Changes
from batching.config import EngineConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.fit.estimate import estimate
from batching.fit.weights import Compute
from batching.inputs.sampling_params import SamplingParams
from batching.model_files.description import describe
from batching.pooling import PoolingParams
from batching.request import BatchRequest
from batching.scheduling.outputs import RequestFailure, RequestOutput
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.adapter_files import peft_tensors, write_peft
from tests.support.gguf_models import BPE, metadata_of, random_model, tensors_of
from tests.support.gguf_writer import RawTensor, write_gguf
from tests.support.model_files import write_tiny
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model
from tests.support.requests import make_request
from tests.support.vision_models import FAMILIES, Prompt, write_vision_model

TOLERANCE: Final = 1e-4
RANK: Final = 2
SCORED: Final = SamplingParams(temperature=0.0, logprobs=0)
# The kernels take quantized weights as they are; MLX needs floats for a CPU's BLAS.
DTYPES: Final = {"auto": "auto", "off": "float32"}
Matrices = dict[str, tuple[Any, Any]]


def engine_of(path: Path, **config: Any) -> LoadedEngine:
    limits = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "device": "cpu"}
    exact = {"cpu_precision": "exact", "weights_cache_gib": 0, "max_adapter_rank": 4}
    return build_engine(
        EngineConfig(model=str(path), model_id="tiny", **{**limits, **exact, **config})
    )


def run(loaded: LoadedEngine, *requests: BatchRequest) -> dict[int, list[float]]:
    """Run requests to their ends; return the log probabilities of what they sampled, or their vectors."""
    found: dict[int, list[float]] = defaultdict(list)
    loaded.engine.add(*requests)
    while loaded.engine.has_work:
        for item in loaded.engine.step():
            assert isinstance(item, RequestOutput), item
            found[item.request_id] += [each.logprob for each in item.output.logprobs]
            if item.output.embedding is not None:
                found[item.request_id] += item.output.embedding
    return found


def random_matrices(layers: AdaptableLayers, seed: int) -> Matrices:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> Any:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    return {
        path: (matrix(layer.inputs, RANK), matrix(RANK, layer.outputs))
        for path, layer in layers.layers.items()
    }


def write_adapter(folder: Path, matrices: Matrices) -> Adapter:
    """Write an adapter of scale 3, as PEFT does."""
    write_peft(folder, peft_tensors(matrices), r=RANK, lora_alpha=3 * RANK)
    return AdapterFile(folder, folder.name).adapter


def merge(folder: Path, merged: Path, matrices: Matrices) -> Path:
    """Write the same model with an adapter in its weights, which the file may name otherwise."""
    shutil.copytree(folder, merged)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    for path, (a, b) in matrices.items():
        end = path[path.index("layers.") :]
        (name,) = (each for each in weights if each.endswith(f"{end}.weight") and "vis" not in each)
        weights[name] = weights[name] + 3 * mx.array(a @ b).T
    mx.save_safetensors(str(merged / "model.safetensors"), weights)
    return merged


def requests_with(adapter: Adapter | None, first_id: int) -> list[BatchRequest]:
    asked: list[dict[str, Any]] = [
        {"prompt": [3, 1, 4, 1, 5], "max_tokens": 6, "sampling": SCORED},
        {"prompt": [2, 7, 1, 8, 2, 8, 1, 8, 2], "max_tokens": 6, "sampling": SCORED},
        {"prompt": [9, 8, 7], "max_tokens": 0, "pooling": PoolingParams()},
    ]
    return [make_request(first_id + i, adapter=adapter, **each) for i, each in enumerate(asked)]


def assert_alike(found: Sequence[float], expected: Sequence[float]) -> None:
    assert found and np.abs(np.array(found) - expected).max() < TOLERANCE


@pytest.mark.parametrize("native", ["auto", "off"])
def test_texts_and_embeddings(native: str, tmp_path: Path) -> None:
    """Two adapters and the base in one batch."""
    folder = write_tiny("qwen3", tmp_path / "base")
    loaded = engine_of(folder, native=native, max_adapters=2, pooling="last")
    layers = loaded.model.adapters
    assert isinstance(layers, AdaptableLayers)
    chosen: list[tuple[Adapter | None, Path]] = [(None, folder)]
    for seed in (1, 2):
        matrices = random_matrices(layers, seed)
        adapter = write_adapter(tmp_path / f"adapter-{seed}", matrices)
        chosen.append((adapter, merge(folder, tmp_path / f"merged-{seed}", matrices)))
    requests = [requests_with(adapter, 10 * i) for i, (adapter, _) in enumerate(chosen)]
    found = run(loaded, *(each for some in requests for each in some))
    loaded.close()
    for i, (_, merged) in enumerate(chosen):
        alone = engine_of(merged, native=native, pooling="last")
        expected = run(alone, *requests_with(None, 10 * i))
        alone.close()
        for request in requests[i]:
            assert_alike(found[request.request_id], expected[request.request_id])


@pytest.mark.parametrize("native", ["auto", "off"])
def test_images(native: str, tmp_path: Path) -> None:
    family = FAMILIES["qwen2_5_vl"]
    write_vision_model(family.config, tmp_path / "base")
    prompt = Prompt.of([5, 6, 7], family.image(0), [8, 9])

    def asked(request_id: int, adapter: Adapter | None) -> BatchRequest:
        return make_request(
            request_id,
            prompt.token_ids,
            images=prompt.images,
            max_tokens=6,
            sampling=SCORED,
            adapter=adapter,
        )

    loaded = engine_of(tmp_path / "base", native=native, max_adapters=1)
    layers = loaded.model.adapters
    assert isinstance(layers, AdaptableLayers)
    matrices = random_matrices(layers, 3)
    adapter = write_adapter(tmp_path / "adapter", matrices)
    found = run(loaded, asked(0, None), asked(1, adapter))
    loaded.close()
    alone = [
        engine_of(folder, native=native)
        for folder in (tmp_path / "base", merge(tmp_path / "base", tmp_path / "merged", matrices))
    ]
    for request_id, each in enumerate(alone):
        assert_alike(found[request_id], run(each, asked(0, None))[0])
        each.close()


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kind", [Type.Q8_0, pytest.param(Type.Q4_0, marks=pytest.mark.slow)])
def test_a_gguf_file(native: str, kind: Type, tmp_path: Path) -> None:
    model, config = random_model("llama")
    tensors = tensors_of(model, config)
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray) and tensor.ndim == 2 and name.startswith("blk."):
            tensors[name] = RawTensor(kind, tensor.shape, quantize(tensor, kind).tobytes())
    path = write_gguf(tmp_path / "base.gguf", metadata_of(config) | BPE, tensors)
    loaded = engine_of(path, native=native, max_adapters=1, dtype=DTYPES[native])
    layers = loaded.model.adapters
    assert isinstance(layers, AdaptableLayers)
    matrices = random_matrices(layers, 4)
    adapter = write_adapter(tmp_path / "adapter", matrices)
    requests = requests_with(adapter, 0)[:2]
    found = run(loaded, *requests)
    loaded.close()
    modules = dict(model.named_modules())
    for name, (a, b) in matrices.items():
        rounded = dequantize(quantize(np.array(modules[name].weight), kind), kind)
        modules[name].weight = mx.array(rounded) + 3 * mx.array(a @ b).T
    for request in requests:
        assert_alike(found[request.request_id], scores_of(model, request))


def scores_of(model: nn.Module, request: BatchRequest) -> list[float]:
    logits = model(mx.array([request.token_ids]))[0]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    positions = range(request.num_prompt_tokens - 1, len(request.token_ids) - 1)
    return [float(expected[at, request.token_ids[at + 1]]) for at in positions]


def test_slots_take_memory_that_is_counted_before(tmp_path: Path) -> None:
    folder = write_tiny("qwen3", tmp_path / "base")
    loaded = engine_of(folder, max_adapters=3)
    layers = loaded.model.adapters
    assert isinstance(layers, AdaptableLayers)
    numbers = sum(layer.inputs + layer.outputs for layer in layers.layers.values())
    assert loaded.memory.adapters == 3 * 4 * layers.max_rank * numbers
    assert "adapters  up to 3 of rank 4 on 14 layers (0 MiB)" in loaded.startup_lines
    loaded.close()
    config = EngineConfig(
        model=str(folder), model_id="tiny", max_adapters=3, max_adapter_rank=layers.max_rank
    )
    needs = estimate(describe(folder), config, Compute.KERNELS)
    assert needs.adapters == loaded.memory.adapters
    without = estimate(describe(folder), replace(config, max_adapters=0), Compute.KERNELS)
    assert needs.least == without.least + needs.adapters
    assert needs.wanted == without.wanted + needs.adapters


def test_the_pool_leaves_room_for_the_slots(tmp_path: Path) -> None:
    folder = write_tiny("qwen3", tmp_path / "base")
    sizes: list[tuple[int, int]] = []
    for max_adapters in (0, 100):
        loaded = engine_of(
            folder,
            num_blocks=None,
            max_blocks=1 << 20,
            memory_budget=16 << 20,
            max_adapters=max_adapters,
        )
        sizes.append((loaded.memory.kv_cache, loaded.memory.adapters))
        loaded.close()
    (without, _), (beside, slots) = sizes
    # A pool takes half of what is left.
    assert slots > 1 << 20
    assert without - beside == pytest.approx(slots / 2, rel=0.02)


@pytest.mark.parametrize(("name", "takes_peft"), [("falcon_h1", False), ("qwen3", True)])
def test_what_mlx_lm_multiplies_takes_none_of_peft(name: str, takes_peft: bool) -> None:
    model = make_tiny(name)
    adapted = AdaptedModel(model, VOCAB_SIZE, survey(model))
    checked = check_model(model, VOCAB_SIZE)
    config = EngineConfig(model="m", model_id="m", max_adapters=1)
    opened = open_adapters(config, adapted, checked, Changes())
    assert isinstance(opened, OpenAdapters)
    assert opened.model.layers.takes_peft is takes_peft


def test_without_slots_nothing_is_prepared(tmp_path: Path) -> None:
    loaded = engine_of(write_tiny("qwen3", tmp_path / "base"))
    assert loaded.model.adapters == NO_ADAPTERS
    assert loaded.memory.adapters == 0
    loaded.close()


@pytest.fixture
def turned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of Qwen3 gets its rows in another order."""

    def call(self: nn.Module, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(self.up_proj(x.swapaxes(0, 1)).swapaxes(0, 1))
        return y

    monkeypatch.setattr(qwen3.MLP, "__call__", call)


REASON: Final = (
    "takes no adapters: ValueError: model.layers.0.mlp.up_proj is not called with the rows"
)


def test_a_model_that_turns_its_rows_is_served_without(
    turned_rows: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = engine_of(write_tiny("qwen3", tmp_path / "base"), native="off", max_adapters=1)
    assert isinstance(loaded.model.adapters, NoAdapters)
    assert loaded.model.adapters.reason.startswith(REASON)
    assert REASON in caplog.text
    assert loaded.memory.adapters == 0
    assert len(run(loaded, make_request(0, [1, 2, 3], max_tokens=4, sampling=SCORED))[0]) == 4
    loaded.close()


def test_a_device_without_the_product_of_unlike_decodes_is_served_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such product")

    monkeypatch.setattr(mx, "gather_mm", fail)
    model = make_tiny("qwen3")
    adapted = AdaptedModel(model, VOCAB_SIZE, survey(model))
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.CUDA)
    config = EngineConfig(model="m", model_id="m", max_adapters=1)
    opened = open_adapters(config, adapted, checked, Changes())
    assert opened == NoAdapters("takes no adapters: RuntimeError: no such product")


def test_such_a_model_stays_as_it_is(turned_rows: None) -> None:
    model = make_tiny("qwen3")
    adapted = AdaptedModel(model, VOCAB_SIZE, survey(model))
    checked = check_model(model, VOCAB_SIZE)
    config = EngineConfig(model="m", model_id="m", max_adapters=1)
    assert isinstance(open_adapters(config, adapted, checked, Changes()), NoAdapters)
    modules = dict(model.named_modules())
    assert {type(modules[path]) for path in adapted.found.layers} == {nn.Linear}


def test_prefixes_on_disk_are_known_by_what_an_adapter_contains(tmp_path: Path) -> None:
    """In the next life of an engine each adapter finds its own, and one that was trained again finds nothing."""
    folder = write_tiny("qwen3", tmp_path / "base")
    matrices = [random_matrices(_layers_of(folder), seed) for seed in (1, 2, 3)]
    one, two = (write_adapter(tmp_path / f"adapter{i}", matrices[i]) for i in (0, 1))
    adapters: list[Adapter | None] = [one, two, None]

    def life(*adapters: Adapter | None) -> tuple[list[list[float]], list[int]]:
        loaded = engine_of(folder, max_adapters=2, kv_cache_dir=tmp_path / "kv")
        prompt = [1 + i % 7 for i in range(41)]
        fields: dict[str, Any] = {"max_tokens": 4, "sampling": SCORED}
        requests = [make_request(i, prompt, adapter=a, **fields) for i, a in enumerate(adapters)]
        found = run(loaded, *requests)
        loaded.engine.save_rest(60.0)
        loaded.close()
        return [found[i] for i in range(len(requests))], [r.num_cached_tokens for r in requests]

    first, cached = life(*adapters)
    assert cached == [0, 0, 0]
    again, cached = life(*adapters)
    assert cached == [40, 40, 40]
    for found, expected in zip(again, first, strict=True):
        assert_alike(found, expected)
    shutil.rmtree(tmp_path / "adapter0")
    changed, cached = life(write_adapter(tmp_path / "adapter0", matrices[2]), two)
    assert cached == [0, 40]
    assert np.abs(np.array(changed[0]) - first[0]).max() > TOLERANCE
    assert_alike(changed[1], first[1])


def _layers_of(folder: Path) -> AdaptableLayers:
    loaded = engine_of(folder, max_adapters=1)
    layers = loaded.model.adapters
    loaded.close()
    assert isinstance(layers, AdaptableLayers)
    return layers


@pytest.mark.parametrize("native", ["auto", "off"])
def test_an_adapter_that_overflows_is_refused_from_then_on(native: str, tmp_path: Path) -> None:
    """Each of its requests would cost the others what they have computed."""
    folder = write_tiny("qwen3", tmp_path / "base")
    loaded = engine_of(folder, native=native, max_adapters=2)
    assert isinstance(loaded.model.adapters, AdaptableLayers)
    large = {
        p: (a * 1e18, b * 1e18) for p, (a, b) in random_matrices(loaded.model.adapters, 1).items()
    }
    write_peft(tmp_path / "large", peft_tensors(large), r=RANK, lora_alpha=RANK)
    file = AdapterFile(tmp_path / "large", "large")
    bad, good = (
        make_request(i, [3, 1, 4], max_tokens=4, adapter=a)
        for i, a in enumerate((file.adapter, None))
    )
    loaded.engine.add(bad, good)
    items = []
    while loaded.engine.has_work:
        items += loaded.engine.step()
    loaded.close()
    assert [each.request_id for each in items if isinstance(each, RequestFailure)] == [0]
    assert good.num_output_tokens == 4
    assert file.fault == "the adapter 'large' gives numbers that are not finite"
