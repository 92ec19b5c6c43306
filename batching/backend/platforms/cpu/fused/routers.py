"""How a mixture chooses and weighs its experts, as its own code does with stand-ins for its layers.

The logits that these give are far enough apart that no rounding decides what is chosen.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from batching.backend.host_array import host_array
from batching.backend.platforms.cpu.fused.parts import Parts, UnknownPart, floats_of, layers_of
from batching.backend.platforms.cpu.layers.linear import Linear

# Names of the parts of a router that is more than a linear layer.
_LAYER: Final = (("weight",), ("layer",), ("wg",), ("gate_proj",))
_CORRECTION: Final = (("e_score_correction_bias",), ("expert_bias",))
_NUM_GROUPS: Final = ("n_group",)
_TOP_GROUPS: Final = ("topk_group",)
_FACTOR: Final = ("routed_scaling_factor",)
# Numbers that a model may add to the sum of the weights.
_EPSILONS: Final = (0.0, 1e-20, 1e-6)
# Scales and shifts of logits from -3 to 3.  With the last ones, a sum of sigmoids is as small as what
# is added to it.
_LOGITS: Final = ((1, 0), (1, 0), (5, -10), (1, -14), (1, -45))
_TOLERANCE: Final = 1e-5

# Makes the kernels' router, with a correction.
_Make = Callable[[list[float]], Any]


class RouterParts:
    """The layer of a router, and what else it or its mixture has for it."""

    def __init__(self, kernels: Any, router: nn.Module, of_mixture: Parts) -> None:
        is_layer = type(router) in (Linear, nn.Linear)
        parts = of_mixture if is_layer else Parts(router)
        self._router = router
        self._inner = router if is_layer else parts.any_of(*_LAYER)[0]
        self.correction = parts.maybe(_CORRECTION)
        self.numbers = {
            "num_groups": int(parts.number(_NUM_GROUPS, 1)),
            "top_groups": int(parts.number(_TOP_GROUPS, 1)),
            "factor": parts.number(_FACTOR, 1.0),
        }
        if not is_layer:
            parts.end()
        self.layer = packed_layer(kernels, self._inner)
        self.num_experts: int = self.layer[0].shape[0]

    def stand_ins(self, correction: mx.array) -> dict[int, Any]:
        """Return a router whose input is its logits, and a correction."""
        is_array = isinstance(self._inner, mx.array)
        inner = mx.eye(self.num_experts) if is_array else _identity
        stand_ins = {id(self._inner): inner, id(self.correction): correction}
        if self._router is not self._inner:
            stand_ins[id(self._router)] = with_stand_ins(self._router, stand_ins)
        return stand_ins


def find_router(
    kernels: Any, mixture: nn.Module, parts: RouterParts, others: Mapping[int, Any]
) -> Any:
    """Return the router of the kernels that weighs as a mixture does.

    others: stand-ins for its other parts, by the identity of these; `OneHot` for its experts.
    """
    one_hot = OneHot(parts.num_experts)
    correction, logits = _random(parts.num_experts)
    stand_ins = {**others, **parts.stand_ins(mx.array(correction, mx.float32))}
    stand_ins = {key: one_hot if new is OneHot else new for key, new in stand_ins.items()}
    weigh = with_stand_ins(mixture, stand_ins)
    expected = host_array(weigh(mx.array(logits[:, None], mx.float32))).reshape(logits.shape)
    tried = [] if parts.correction is None else correction.tolist()
    for make in _routers(kernels, parts, one_hot.top_k):
        differences = np.abs(_weights(kernels, make(tried), logits) - expected)
        if (differences.max(axis=1) <= _TOLERANCE * expected.max(axis=1)).all():
            return make(floats_of(parts.correction))
    raise UnknownPart(f"{type(mixture).__name__} weighs experts in another way")


class OneHot:
    """Stands in for experts: each gives the vector that is one at its own index."""

    def __init__(self, num_experts: int) -> None:
        self._experts = mx.arange(num_experts)
        self.top_k = 0

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.top_k = indices.shape[-1]
        return (indices[..., None] == self._experts).astype(mx.float32)


def with_stand_ins(module: nn.Module, stand_ins: Mapping[int, Any]) -> nn.Module:
    """Copy a module with other children, by the identity of its own."""
    copied = copy.copy(module)
    for name, child in module.items():
        if id(child) in stand_ins:
            copied[name] = stand_ins[id(child)]
    return copied


def packed_layer(kernels: Any, layer: nn.Module | mx.array) -> tuple[Any, list[float]]:
    """Return a layer as halves have it, also one that is too thin for the kernels by itself."""
    if isinstance(layer, mx.array):
        return kernels.pack(layer), []
    if type(layer) is nn.Linear:
        return kernels.pack(layer.weight), floats_of(layer.get("bias"))
    return layers_of([layer])[0]


def _identity(x: mx.array) -> mx.array:
    return x


def _random(num_experts: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return a correction and rows of logits."""
    rng = np.random.default_rng(0)
    rows = [scale * rng.permutation(np.linspace(-3, 3, num_experts)) + x for scale, x in _LOGITS]
    return rng.permutation(np.linspace(0.1, 1.1, num_experts)), np.array(rows)


def _routers(kernels: Any, parts: RouterParts, top_k: int) -> Iterator[_Make]:
    for is_sigmoid, is_normalized, epsilon in product((False, True), (False, True), _EPSILONS):
        yield partial(
            kernels.router,
            parts.num_experts,
            top_k,
            is_sigmoid,
            is_normalized=is_normalized,
            epsilon=epsilon,
            **parts.numbers,
        )


def _weights(kernels: Any, router: Any, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weight of each expert for each row, 0 for those that are not chosen."""
    weights = np.zeros(logits.shape)
    for row, of_row in zip(weights, logits, strict=True):
        for index, weight in kernels.route(router, of_row.tolist()):
            row[index] = weight
    return weights
