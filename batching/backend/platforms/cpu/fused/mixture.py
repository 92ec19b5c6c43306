"""A mixture of experts as one operation of the kernels, in place of a block's MLP or by itself."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.platforms.cpu.fused.halves import MlpHalf
from batching.backend.platforms.cpu.fused.parts import NOTHING, Around, Parts, UnknownPart, norm_of
from batching.backend.platforms.cpu.fused.routers import (
    OneHot,
    RouterParts,
    find_router,
    packed_layer,
)
from batching.backend.platforms.cpu.layers.experts import Experts

_EXPERTS: Final = (("switch_mlp",), ("experts",))
_ROUTER: Final = (("gate",), ("router",))
_SHARED: Final = (("shared_expert",), ("shared_experts",), ("shared_mlp",))
# Without arrays; what it computes is found with the rest.
_ACTIVATION: Final = (("gate_act",),)
_SHARED_GATE: Final = (("shared_expert_gate",),)


class MixtureHalf:
    """The experts that a router chooses for a row, and a shared one."""

    def __init__(self, kernels: Any, mixture: nn.Module, around: Around = NOTHING) -> None:
        parts = Parts(mixture)
        (experts,), (router,) = parts.any_of(*_EXPERTS), parts.any_of(*_ROUTER)
        shared, gate = parts.maybe(_SHARED), parts.maybe(_SHARED_GATE)
        if type(experts) is not Experts:
            raise UnknownPart(f"{type(mixture).__name__} has other experts")
        parts.maybe(_ACTIVATION)
        of_router = RouterParts(kernels, router, parts)
        parts.end()
        others = {id(experts): OneHot, id(shared): mx.zeros_like, id(gate): _first}
        try:
            found = find_router(kernels, mixture, of_router, others)
        except Exception as error:
            # Any code can be in a model file.
            raise UnknownPart(f"{type(mixture).__name__} does more than a mixture") from error
        size = of_router.layer[0].shape[1]
        self.size = size
        self._run = kernels.run_mixture
        self._half = kernels.mixture(
            of_router.layer,
            found,
            experts.gated,
            [norm_of(norm, size) for norm in (around.norm, around.output_norm)],
            None if shared is None else MlpHalf(kernels, shared).half,
            None if gate is None else packed_layer(kernels, gate),
            around.residual,
        )

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self._run(x, self._half)
        return output


def _first(x: mx.array) -> mx.array:
    return x[..., :1]
