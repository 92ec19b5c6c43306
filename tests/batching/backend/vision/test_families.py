"""Images in batches, against mlx-vlm's own plain forward pass: each family, each pool."""

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batching.backend.builder.engine import build_engine
from batching.backend.devices import Gpu
from batching.backend.hooks.changes import Changes
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.vision import mlx_vlm_text
from batching.backend.vision.mlx_vlm_models import NoVisionModel
from batching.backend.vision.opening import open_vision
from batching.backend.vision.text_part import has_text_part
from batching.batch_inference import BatchInferenceEngine
from batching.config import EngineConfig
from batching.engine.load_slices import ONE_SLICE
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError
from batching.fit.weights import Compute, weight_bytes
from batching.inputs.sampling_params import SamplingParams
from batching.model_files.description import describe
from batching.model_files.model_types import served_as
from batching.model_files.vision import declared_vision
from batching.model_info.vision import NoVision, VisionModel
from batching.request import BatchRequest
from batching.scheduling.outputs import RequestFailure, RequestOutput
from tests.support.host_kernels import HostKernels
from tests.support.model_files import edit_config
from tests.support.platforms import platform_of
from tests.support.requests import make_request
from tests.support.tiny_models import DEVICE_KINDS
from tests.support.vision_models import (
    FAMILIES,
    Prompt,
    make_vision_model,
    plain_logits,
    write_vision_model,
)
from tests.support.weekly import weekly_pairs

TOLERANCE: Final = 1e-4
# Enough that some are preempted, although they do not all decode at once.
NUM_OUTPUT: Final = 12
# Nothing is done in that time: each step has a single piece of an image.
IN_PIECES: Final = {"max_stall_ms": 1e-6, "max_urgent_wait_ms": 1e-6}
BLOCK_SIZE: Final = 4


def words(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, count)]


def prompts_of(family: str) -> list[Prompt]:
    image = FAMILIES[family].image
    return [
        Prompt.of(words(1, 5), image(0), words(2, 4), image(1), words(3, 7)),
        Prompt.of(words(4, 3), image(3), words(5, 9)),
        Prompt.of(words(6, 20)),
    ]


def next_prompt_of(family: str, seed: int) -> Prompt:
    """Return a prompt that begins like the second one, up to the image's last row."""
    return Prompt.of(words(4, 3), FAMILIES[family].image(3), words(seed, 6))


def engine_of(folder: Path, **config: Any) -> LoadedEngine:
    limits = {"num_blocks": 64, "block_size": BLOCK_SIZE, "max_num_seqs": 4, "device": "cpu"}
    exact = {"cpu_precision": "exact", "weights_cache_gib": 0}
    return build_engine(
        EngineConfig(model=str(folder), model_id="tiny", **{**limits, **exact, **config})
    )


def run(engine: BatchInferenceEngine, *requests: BatchRequest) -> dict[int, list[float]]:
    """Run requests to their ends; return the log probabilities of what each one sampled."""
    scores: dict[int, list[float]] = defaultdict(list)
    engine.add(*requests)
    while engine.has_work:
        for item in engine.step():
            assert isinstance(item, RequestOutput)
            scores[item.request_id] += [each.logprob for each in item.output.logprobs]
    return scores


def num_blocks_for(*prompts: Prompt) -> int:
    """Return how many blocks hold these prompts, but not all of what they are answered."""
    return sum(-(-len(each.token_ids) // BLOCK_SIZE) for each in prompts) + 2


def check_family(family: str, folder: Path, **config: Any) -> None:
    """Compare a model in batches with mlx-vlm's plain pass of it: chunks, forks, preempted requests, and hits."""
    model = make_vision_model(family, folder)
    prompts = prompts_of(family)
    loaded = engine_of(folder, num_blocks=num_blocks_for(*prompts), **config)
    scored = SamplingParams(temperature=0, logprobs=0, prompt_logprobs=0)
    requests = [requested(i, each, scored) for i, each in enumerate(prompts)]
    fork = requests[1].fork(len(requests))
    of_output = replace(scored, prompt_logprobs=None)
    cached = [requested(i, next_prompt_of(family, i), of_output) for i in (7, 8)]
    try:
        scores = run(loaded.engine, *requests, fork)
        for each in cached:
            scores |= run(loaded.engine, each)
    finally:
        loaded.close()
    # A model with windows has fewer requests at once.
    assert sum(each.num_preemptions for each in (*requests, fork)) or "gemma" in family
    assert cached[-1].num_cached_tokens
    for request in (*requests, fork, *cached):
        prompt = Prompt(request.spec.prompt, request.spec.images)
        check_against_plain(family, model, prompt, request, scores[request.request_id])


def requested(request_id: int, prompt: Prompt, sampling: SamplingParams) -> BatchRequest:
    given: dict[str, Any] = {
        "max_tokens": NUM_OUTPUT,
        "sampling": sampling,
        "images": prompt.images,
    }
    return make_request(request_id, prompt.token_ids, **given)


def check_against_plain(
    family: str, model: Any, prompt: Prompt, request: BatchRequest, scores: Sequence[float]
) -> None:
    """Compare what a request sampled with the plain pass, and the log probabilities of that and of its prompt."""
    length, output = len(prompt.token_ids), request.output_token_ids
    logits = plain_logits(model, prompt, output[:-1], FAMILIES[family])
    assert output == mx.argmax(logits[length - 1 :], axis=-1).tolist()
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    of_prompt = [each.logprob for each in request.prompt_logprobs]
    at = [*range(len(of_prompt)), *range(length - 1, length - 1 + len(output))]
    plain = [float(expected[i, request.token_ids[i + 1]]) for i in at]
    assert np.abs(np.array([*of_prompt, *scores]) - plain).max() < TOLERANCE


def use_gpu_kernels(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(gpu=Gpu.METAL, kernels=HostKernels(native))
    monkeypatch.setattr(
        "batching.backend.builder.engine.choose_platform", lambda *_, **__: platform
    )


@pytest.mark.parametrize(("family", "pool"), weekly_pairs(FAMILIES, DEVICE_KINDS, size=9))
def test_log_probabilities_are_those_of_the_plain_pass(
    family: str, pool: str, native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pool == "with a GPU's kernels":
        use_gpu_kernels(native, monkeypatch)
    uses = "auto" if pool == "with native kernels" else "off"
    # Room for spans of 16 beside decodes.
    limits = {"prefill_chunk": 11, "max_num_batched_tokens": 28}
    check_family(family, tmp_path / family, native=uses, **limits, **IN_PIECES)


def test_a_step_with_one_row_of_an_image_is_not_run_by_the_graph_of_decodes(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gpu_kernels(native, monkeypatch)
    limits = {"prefill_chunk": 1, "max_num_batched_tokens": 4}
    check_family("qwen2_5_vl", tmp_path / "model", native="off", **limits)


def test_a_stream_goes_on_between_the_pieces_of_an_image_that_starts_over_after_an_abort(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vision_model(FAMILIES["llava"].deep(8), tmp_path)
    prompt = Prompt.of(words(1, 2), FAMILIES["llava"].image(0), words(2, 3))
    scored = SamplingParams(temperature=0, prompt_logprobs=0)
    whole, aborted, again = (
        make_request(i, prompt.token_ids, max_tokens=1, sampling=scored, images=prompt.images)
        for i in range(3)
    )
    with_whole = engine_of(tmp_path)
    try:
        run(with_whole.engine, whole)
    finally:
        with_whole.close()
    stream = make_request(3, words(3, 4), max_tokens=100)
    loaded = engine_of(tmp_path, **IN_PIECES)
    engine = loaded.engine
    caplog.set_level(logging.DEBUG, "batching.batch_inference")
    try:
        engine.add(stream, aborted)
        for _ in range(6):
            engine.step()
        engine.abort(aborted.request_id)
        for _ in range(2):
            engine.step()
        engine.add(again)
        while not again.has_ended:
            engine.step()
    finally:
        loaded.close()
    pieces = [re.search(r" 3\[.*16\[(\d):\d\]", step) for step in caplog.messages]
    assert [int(found[1]) for found in pieces if found] == [*range(4), *range(8)]
    assert again.prompt_logprobs == whole.prompt_logprobs


def test_an_image_that_the_tower_does_not_take_fails_its_request_alone(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path / "model")
    loaded = engine_of(tmp_path / "model")
    whole = FAMILIES["qwen3_vl"].image(0)
    pixels, grid = whole.arrays
    fewer = replace(whole, token_ids=whole.token_ids[1:], rows=whole.rows[:-1])
    cut = replace(whole, arrays=(pixels._replace(shape=(4, *pixels.shape[1:])), grid))
    prompts = [Prompt.of(words(1, 3), image, words(2, 3)) for image in (whole, fewer, cut)]
    requests = [
        make_request(i, p.token_ids, max_tokens=2, images=p.images) for i, p in enumerate(prompts)
    ]
    loaded.engine.add(*requests)
    failed: list[int] = []
    try:
        while loaded.engine.has_work:
            items = loaded.engine.step()
            failed += [each.request_id for each in items if isinstance(each, RequestFailure)]
    finally:
        loaded.close()
    assert sorted(failed) == [1, 2]
    assert len(requests[0].output_token_ids) == 2


def test_a_family_that_is_not_tried_is_served_without_its_vision_part(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path / "model")
    edit_config(tmp_path / "model", model_type="mllama")
    found = open_vision(str(tmp_path / "model"), nn.Module(), None, Changes(), ONE_SLICE, 64)
    assert isinstance(found, NoVision)
    assert "images of the type mllama are not supported; those of gemma3, " in found.reason


def test_every_family_is_known_by_its_config() -> None:
    for config in (family.config for family in FAMILIES.values()):
        assert isinstance(declared_vision(config, Path()), VisionModel)
        text_type = config["text_config"]["model_type"]
        # A type that mlx-lm lacks is served by its text part.
        assert has_text_part(config) == (served_as(config["model_type"]) is None)
        assert served_as(config["model_type"], text_type)


def test_the_memory_of_a_vision_model_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    make_vision_model("qwen3_vl", tmp_path / "model")
    loaded = engine_of(tmp_path / "model", native="off")
    loaded.close()
    described = describe(tmp_path / "model")
    assert described.tower
    assert weight_bytes(described, Compute.FLOATS) == loaded.memory.weights


def test_an_image_whose_rows_see_each_other_needs_room_in_a_step(tmp_path: Path) -> None:
    make_vision_model("gemma3", tmp_path / "model")
    found = open_vision(str(tmp_path / "model"), nn.Module(), None, Changes(), ONE_SLICE, 15)
    assert isinstance(found, NoVision)
    assert "16 tokens of an image see each other, and a step has room for 15" in found.reason


def test_a_text_model_that_only_mlx_vlm_has_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision_model("glm4v", tmp_path / "model")

    def no_model(_: str) -> Any:
        raise NoVisionModel("mlx-vlm is not installed")

    monkeypatch.setattr(mlx_vlm_text, "model_file", no_model)
    with pytest.raises(ModelLoadError, match="no glm4v, and mlx-vlm is not installed; pip install"):
        engine_of(tmp_path / "model")
