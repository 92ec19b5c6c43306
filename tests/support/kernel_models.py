"""Small models on the pool of kernels, which run on the host, and on the portable pool."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from batching.backend.devices import Gpu
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.request import BatchRequest
from tests.support.host_kernels import HostKernels
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, gpu_of, on_kernels
from tests.support.serving import limits, make_runner, serve
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.support.zoo.latent import LATENT_MODELS

# Windows and sinks, soft caps, norms of heads, and latents.
FAMILIES: Final = ["qwen3", "gpt_oss", "gemma2", "gemma3_text", "mistral", "deepseek_v3"]
BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 64


class Served:
    """A model, hooked once, and its pools."""

    def __init__(self, family: str, native: Native) -> None:
        self.model = make_tiny(family) if family in LATENT_MODELS else tiny_model(family)
        self.calls: list[str] = []
        kernels = HostKernels(native, self.calls.append)
        self.checked = check_model(self.model, VOCAB_SIZE, gpu=Gpu.METAL, kernels=kernels)
        assert gpu_of(self.checked).kernels is kernels
        self.portable = on_kernels(self.checked, None)

    def tokens(
        self, requests: Callable[[], Sequence[BatchRequest]], *, on_kernels: bool, queued: bool
    ) -> list[list[int]]:
        checked = self.checked if on_kernels else self.portable
        runner = make_runner(self.model, VOCAB_SIZE, checked)
        assert runner.takes_queued_steps == on_kernels
        made = requests()
        serve(runner if queued else Unqueued(runner), limits(checked), made)
        return [request.output_token_ids for request in made]


class Unqueued:
    """A runner whose steps are not queued."""

    def __init__(self, runner: MLXRunner) -> None:
        self.run, self.reset = runner.run, runner.reset


@cache
def served(family: str, native: Native) -> Served:
    return Served(family, native)
