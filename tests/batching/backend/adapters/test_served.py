"""Requests with unlike adapters, served together, get what mlx-lm's model gives with the adapter of each."""

from functools import partial
from itertools import product
from typing import Any, Final

import pytest

from batching.backend.devices import Gpu
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.platform import GPUPlatform
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support import foreign_model
from tests.support.adapted_models import Adapted, adapt
from tests.support.adapter_requests import serve_adapted
from tests.support.host_kernels import HostKernels
from tests.support.model_zoo import INCONSISTENT, LEAPING, UNAVAILABLE, ZOO, make_tiny
from tests.support.weekly import weekly

# Of a log probability, in float32.
TOLERANCE: Final = 1e-4
# mlx-lm's own logits differ by as much between merged weights and an adapter beside them.
TOLERANCES: Final = dict.fromkeys(("nanbeige", "recurrent_gemma", "longcat_flash_ngram"), 1e-3)
PLATFORMS: Final = ("mlx", "native", "gpu")
# All ragged; windows; latents and experts, one of them shared; recurrent states beside attention, and alone.
KINDS: Final = ("qwen3", "gemma3_text", "deepseek_v3", "qwen3_5", "mamba2")
ALWAYS: Final = {
    ("mlx", "qwen3"),
    ("gpu", "qwen3"),
    ("native", "qwen3"),
    ("native", "deepseek_v3"),
    ("native", "qwen3_5"),
    ("mlx", "mamba2"),
    # It reads a chunk token by token.
    ("native", "mamba"),
    # Its experts are modules that read a row at a time.
    ("mlx", "dbrx"),
}
UNSERVED: Final = {*UNAVAILABLE, *INCONSISTENT, *LEAPING}


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Any:
    """Return the arguments of `adapt` for a platform."""

    def options(platform: str) -> dict[str, Any]:
        native: Native = request.getfixturevalue("native")
        if platform == "gpu":
            return {"gpu": Gpu.CUDA}
        if platform == "gpu's kernels":
            return {"gpu": Gpu.METAL, "kernels": HostKernels(native)}
        return {"native": native} if platform == "native" else {}

    return options


def assert_right(adapted: Adapted, tolerance: float = TOLERANCE) -> None:
    """Ranks and types differ, one has a few layers, and there are more adapters than slots."""
    few = min(adapted.layers.layers).rpartition(".")[2]
    adapters = [
        adapted.add("a", rank=4),
        None,
        adapted.add("b", rank=1, seed=1),
        adapted.add("c", rank=8, seed=2, dtype="BF16"),
        adapted.add("few", rank=2, seed=3, only=few),
        adapted.add("d", rank=3, seed=4, dtype="F16"),
    ]
    outcome = serve_adapted(adapted, adapters)
    assert outcome.difference < tolerance
    assert outcome.stats.num_adapter_loads > 4
    assert outcome.stats.num_preemptions > 0
    assert outcome.stats.num_hit_tokens > 0
    assert outcome.stats.num_accepted_tokens > 0


CASES: Final = [each for each in product(PLATFORMS, ZOO) if each[1] not in UNSERVED]


@pytest.mark.parametrize(("platform", "name"), weekly(CASES, 2, always=ALWAYS))
def test_of_floats(platform: str, name: str, on: Any) -> None:
    adapted = adapt(partial(make_tiny, name), VOCAB_SIZE, **on(platform))
    assert_right(adapted, TOLERANCES.get(name, TOLERANCE))


@pytest.mark.parametrize(
    ("platform", "name", "mode"),
    [
        ("native", "qwen3_5", ExecutionMode.ONE_BY_ONE),
        ("mlx", "mamba2", ExecutionMode.ONE_BY_ONE),
        ("mlx", "qwen3", ExecutionMode.WHOLE),
        ("gpu", "qwen3", ExecutionMode.OWN),
        pytest.param("native", "qwen3", ExecutionMode.OWN, marks=pytest.mark.slow),
        pytest.param("mlx", "qwen3_5", ExecutionMode.OWN, marks=pytest.mark.slow),
    ],
)
def test_in_slower_modes(platform: str, name: str, mode: ExecutionMode, on: Any) -> None:
    known = CheckResult(mode)
    adapted = adapt(partial(make_tiny, name), VOCAB_SIZE, **on(platform), known=known)
    assert adapted.checked.mode is mode
    assert_right(adapted)


def test_attention_that_is_the_models_own() -> None:
    assert_right(adapt(foreign_model.make, VOCAB_SIZE))


def test_on_the_kernels_of_a_gpu(on: Any) -> None:
    """Graphs of steps are kept without adapters, and are not used for those with some."""
    adapted = adapt(partial(make_tiny, "qwen3"), VOCAB_SIZE, **on("gpu's kernels"))
    assert isinstance(adapted.checked.platform, GPUPlatform)
    assert adapted.checked.platform.kernels is not None
    assert_right(adapted)


QUANTIZED: Final = [*product(PLATFORMS, KINDS, (4, 8))]


@pytest.mark.parametrize(
    ("platform", "name", "bits"),
    weekly(QUANTIZED, 1, always=[("native", "qwen3", 4), ("gpu", "qwen3", 8)]),
)
def test_of_quantized_weights(platform: str, name: str, bits: int, on: Any) -> None:
    assert_right(adapt(partial(make_tiny, name, bits=bits), VOCAB_SIZE, **on(platform)))
