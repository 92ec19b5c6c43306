"""Models that take adapters, adapters of random numbers for them, and the same model with an adapter merged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.tuner.lora import LoRALinear

from batching.adapters.adapter import AdaptableLayers, Adapter
from batching.adapters.low_rank import LowRank
from batching.backend.adapters.survey import survey
from batching.backend.builder.adapters import AdaptedModel, OpenAdapters, open_adapters
from batching.backend.devices import Gpu
from batching.backend.execution_mode import CheckResult
from batching.backend.hooks.changes import Changes
from batching.backend.platforms.cpu.adapters import PackedLinears
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.self_check.long_steps import MIN_TOKENS
from batching.config import EngineConfig, SchedulerConfig
from tests.support.host_kernels import HostKernels
from tests.support.platforms import check_model, use_kernels
from tests.support.serving import limits

Floats = npt.NDArray[Any]
Numbers = Mapping[str, LowRank]
MAX_ADAPTERS: Final = 4
MAX_RANK: Final = 8


@dataclass(frozen=True)
class Adapted:
    """A model as a platform serves it, with what it takes.

    plain: makes the same model again.
    numbers: of its adapters, which are in no files.
    """

    plain: Callable[[], nn.Module]
    model: nn.Module
    vocab_size: int
    checked: CheckedModel
    adapters: OpenAdapters
    numbers: dict[Adapter, Numbers]

    @property
    def layers(self) -> AdaptableLayers:
        return self.adapters.model.layers

    def runner(self, config: SchedulerConfig) -> MLXRunner:
        config = limits(self.checked, config)
        cache = self.checked.cache(
            config.num_blocks, config.block_size, num_window_blocks=config.num_window_blocks
        )
        cache.reset()
        return MLXRunner(
            self.model,
            self.vocab_size,
            self.checked.selection,
            cache,
            self.checked.platform.sampler(),
            graphs=self.checked.graphs(cache, is_check=True),
            adapters=self.adapters.model,
        )

    def add(
        self, name: str, *, rank: int, seed: int = 0, only: str = "", dtype: str = "F32"
    ) -> Adapter:
        """Make an adapter for the layers whose paths have `only` in them."""
        rng = np.random.default_rng(seed)

        def random(*shape: int) -> Floats:
            return _rounded(rng.normal(0, 0.3, shape), dtype)

        numbers = {
            path: LowRank(random(layer.inputs, rank), random(rank, layer.outputs), dtype)
            for path, layer in self.layers.layers.items()
            if only in path
        }
        assert numbers, f"no layer is {only}"
        made = Adapter(name, name, f"{name}-{rank}-{seed}", rank)
        self.numbers[made] = numbers
        return made

    def plain_with(self, adapter: Adapter | None) -> nn.Module:
        """Return mlx-lm's model with an adapter: merged into weights that are floats, else beside them."""
        model = self.plain()
        numbers = self.numbers[adapter] if adapter is not None else {}
        modules = dict(model.named_modules())
        for path, (a, b, _) in numbers.items():
            module = modules[path]
            if isinstance(module, nn.QuantizedLinear):
                owner, _, name = path.rpartition(".")
                setattr(modules[owner], name, _lora(module, a, b))
            else:
                module.weight = module.weight + mx.array((a @ b).T)
        model.eval()
        mx.eval(model.parameters())
        return model


def _rounded(values: Floats, dtype: str) -> Floats:
    halves = {"F16": mx.float16, "BF16": mx.bfloat16}
    rounded = mx.array(values.astype(np.float32)).astype(halves.get(dtype, mx.float32))
    return np.array(rounded.astype(mx.float32))


def _lora(linear: Any, a: Floats, b: Floats) -> nn.Module:
    lora: nn.Module = LoRALinear.from_base(linear, r=a.shape[1], scale=1.0)
    lora.lora_a, lora.lora_b = mx.array(a), mx.array(b)
    return lora


def adapt(
    plain: Callable[[], nn.Module],
    vocab_size: int,
    native: Native | None = None,
    *,
    gpu: Gpu | None = None,
    kernels: HostKernels | None = None,
    known: CheckResult | None = None,
) -> Adapted:
    """Put a model on a platform, check it there, and open it for adapters; it is never closed.

    known: the mode in which it is served; None finds the fastest one.
    """
    model = plain()
    found = survey(model)
    packed = None
    if native is not None:
        packing = Packing(native.module)
        model = use_kernels(model, native, packing=packing)
        of_linears = {p: each for p, each in packing.packed.items() if p in found.layers}
        packed = PackedLinears(native.module, of_linears)
    checked = check_model(
        model,
        vocab_size,
        native,
        known=known,
        gpu=gpu,
        kernels=kernels,
        max_model_len=MIN_TOKENS - 1,
    )
    config = EngineConfig(
        model="m",
        model_id="m",
        block_size=4,
        max_adapters=MAX_ADAPTERS,
        max_adapter_rank=MAX_RANK,
    )
    numbers: dict[Adapter, Numbers] = {}
    adapted = AdaptedModel(model, vocab_size, found, packed)
    opened = open_adapters(config, adapted, checked, Changes(), lambda each, _: numbers[each])
    assert isinstance(opened, OpenAdapters), opened
    return Adapted(plain, model, vocab_size, checked, opened, numbers)
