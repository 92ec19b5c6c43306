"""What is left of a model that could not be opened, or was closed: nothing."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta, gemma4_text, llama, ssm

from batching.backend.builder import opening
from batching.backend.builder.engine import build_engine
from batching.backend.hooks.changes import Changes
from batching.backend.memory.device import memory_in_use
from batching.backend.platforms.cpu.layers.activations import rebind_activations
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.config import EngineConfig, NativeMode
from batching.errors import ModelLoadError, PoolTooLarge
from tests.support.model_zoo import make_tiny

NAMES: Final = [
    (llama, "nn"),
    (llama, "mx"),
    (llama, "swiglu"),
    (llama, "scaled_dot_product_attention"),
    (gated_delta, "gated_delta_ops"),
    (ssm, "ssm_attn"),
    (nn, "silu"),
    (mx, "quantize"),
]


def config_of(directory: Path, native: NativeMode = "auto", **more: Any) -> EngineConfig:
    return EngineConfig(model=str(directory), model_id="tiny", native=native, device="cpu", **more)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Names are what they were, and no memory is in use, although an error is still held."""
    gc.collect()
    before, in_use = [vars(owner)[name] for owner, name in NAMES], memory_in_use()
    yield
    assert [vars(owner)[name] for owner, name in NAMES] == before
    # The state of random numbers.
    assert memory_in_use() - in_use <= 16


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_model_whose_pool_does_not_fit_leaves_nothing(
    nothing_is_left: None, directory: Path, native: NativeMode
) -> None:
    with pytest.raises(PoolTooLarge):
        build_engine(config_of(directory, native, num_blocks=1 << 30))


@pytest.mark.parametrize("max_adapters", [0, 2])
@pytest.mark.parametrize("native", ["auto", "off"])
def test_an_engine_is_closed_once(
    nothing_is_left: None, directory: Path, native: NativeMode, max_adapters: int
) -> None:
    loaded = build_engine(config_of(directory, native, num_blocks=8, max_adapters=max_adapters))
    loaded.close()
    loaded.close()


def test_a_pool_that_cannot_be_made_on_the_kernels_is_made_without(
    nothing_is_left: None,
    directory: Path,
    native: Native,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = [RuntimeError("no such size")]

    def runner(*args: Any, **options: Any) -> MLXRunner:
        if failures:
            raise failures.pop()
        return MLXRunner(*args, **options)

    monkeypatch.setattr(opening, "MLXRunner", runner)
    config = config_of(directory, num_blocks=8)
    loaded = build_engine(config)
    assert "kernels   off: the model does not run on them" in loaded.startup_lines
    reason = f"cannot run {directory}: RuntimeError: no such size"
    assert f"without the native kernels: {reason}" in caplog.text
    loaded.close()
    failures.append(RuntimeError("no such size"))
    with pytest.raises(ModelLoadError, match=r"^cannot run .*: RuntimeError: no such size$"):
        build_engine(config_of(directory, "require", num_blocks=8))


def test_functions_that_are_traced_for_all_models_meet_none_of_one_model(native: Native) -> None:
    """`mx.compile` traces `geglu` of that file once, with what `nn.gelu_approx` is then."""
    model, changes = make_tiny("gemma4_text"), Changes()
    rebind_activations(model, native.module, changes)
    assert gemma4_text.nn is nn
    changes.undo()
