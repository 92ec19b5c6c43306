"""What a model needs is read from files that are here, and nothing is downloaded for it."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from batching.backend_calls.machine import Machine
from batching.config import EngineConfig
from batching.fit.weights import Compute
from batching.model_files import vision
from batching.model_files.references import BUNDLED_MODEL
from batching.model_info.vision import TEXT_ONLY, VisionModel
from batching.models.needs import local_path, memory_need, vision_on_disk
from batching.models.residency.model_state import MemoryNeed

MACHINE = Machine(Compute.KERNELS, 1 << 34, None)
MIB = 1 << 20


def need(model: str, num_blocks: int | None = None) -> MemoryNeed:
    config = EngineConfig(model=model, model_id="m", num_blocks=num_blocks)
    needs = memory_need(config, MACHINE)
    assert needs is not None
    return needs


def test_the_bundled_model_needs_its_weights_and_a_pool() -> None:
    needs = need(BUNDLED_MODEL)
    # 92 MiB of weights, 22.5 KiB a token: at least 1024, at most 1024 blocks of 32.
    assert 110 * MIB < needs.least < 120 * MIB
    assert 800 * MIB < needs.wanted < 830 * MIB
    assert need(BUNDLED_MODEL, num_blocks=64).least == need(BUNDLED_MODEL, num_blocks=64).wanted


def test_a_pool_that_takes_what_there_is_needs_its_share_of_the_memory() -> None:
    config = EngineConfig(model=BUNDLED_MODEL, model_id="m", max_blocks=None, memory_fraction=0.25)
    needs = memory_need(config, MACHINE)
    assert needs is not None
    assert needs.wanted == MACHINE.memory // 4


def test_of_what_is_not_here_or_is_no_model_nothing_is_known(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"no model")
    for model in ("org/not-downloaded", str(tmp_path / "none.gguf"), str(tmp_path), str(damaged)):
        assert memory_need(EngineConfig(model=model, model_id="m"), MACHINE) is None


def test_whether_a_model_takes_images_is_read_from_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(model: object) -> object:
        return vision_on_disk(EngineConfig(model=str(model), model_id="m"))

    monkeypatch.setattr(vision, "find_spec", lambda _: object())
    assert found(BUNDLED_MODEL) is TEXT_ONLY
    assert found("org/not-downloaded") is None
    assert found(tmp_path) is None
    config = {"model_type": "llava", "vision_config": {}, "image_token_index": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert found(tmp_path) == VisionModel(tmp_path, "llava", 7)


def test_a_repository_is_found_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(config))
    assert local_path("org/model") == tmp_path
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: object())
    assert local_path("org/model") is None
