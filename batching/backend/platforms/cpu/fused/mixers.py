"""The parts of the recurrent mixers of mlx-lm's models, by the names that they have there.

There is one description for all: a short convolution, a recurrence or none, a gate and a norm; see
`src/operations/mixer.h`.
"""

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.platforms.cpu.fused.parts import Parts, UnknownPart, floats_of

# Layers of one input: q, k and v, z, b and a; or joined by key heads.
_DELTA_LAYERS: Final = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
_DELTA_SIZES: Final = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
_MAMBA_PARTS: Final = (
    *("in_proj", "conv1d", "A_log", "dt_bias", "D", "out_proj"),
    "time_step_limit",
)
_MAMBA_SIZES: Final = ("n_groups", "num_heads", "ssm_state_size", "head_dim")
_NORM_EPS: Final = 1e-6
_NORM_EPS_NAMES: Final = ("eps", "variance_epsilon")
# Channels that a thread has at a time.
_CHANNELS: Final = 256

# A layer, and the first column and the stride of key heads there.
_Columns = tuple[int, int, int]
_NOWHERE: Final = (0, 0, 0)


class Mixer(NamedTuple):
    """The parts of a mixer.

    layers: the last one is the output's.
    channels: the order of the convolution's in a state, if it is another one: q, k and v.
    head_norm: weights and eps.
    options: of the kernels' mixer.
    """

    layers: list[nn.Module]
    convolution: nn.Module
    num_arrays: int
    head_norm: tuple[list[float], float]
    options: dict[str, Any]
    channels: list[int] | None = None


def is_recurrent(module: nn.Module) -> bool:
    return "conv1d" in module or {"conv", "in_proj"}.issubset(module)


def describe(module: nn.Module) -> Mixer:
    """Return what a module is made of; raise UnknownPart if it is none of the known mixers."""
    for kind in _KINDS:
        try:
            return kind(module)
        except UnknownPart:
            pass
        except (ArithmeticError, AttributeError) as error:
            raise UnknownPart(f"the parts of {type(module).__name__} do not fit") from error
    raise UnknownPart(f"{type(module).__name__} is no known mixer")


def _gated_delta_net(module: nn.Module) -> Mixer:
    """Describe that of Qwen3-Next and Qwen3.5."""
    parts = Parts(module)
    inputs = parts.any_of(*_DELTA_LAYERS)
    convolution, a_log, dt_bias, norm, output = parts.any_of(
        ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
    )
    parts.end()
    key_heads, heads, key_dim, value_dim = (int(parts.number([name])) for name in _DELTA_SIZES)
    scale = key_dim**-0.5
    options = {
        "recurrence": "delta",
        "columns": _delta_columns(
            len(inputs) > 2, key_heads, heads // key_heads, key_dim, value_dim
        ),
        "heads": (key_heads, heads),
        "dims": (key_dim, value_dim),
        "decay": _decay(a_log),
        "dt_bias": floats_of(dt_bias),
        "scales": (scale**2, scale),
        "eps": _NORM_EPS * scale**2,
        "norm_width": value_dim,
    }
    return Mixer([*inputs, output], convolution, 2, _head_norm(norm), options)


def _delta_columns(
    is_apart: bool, key_heads: int, group: int, key_dim: int, value_dim: int
) -> list[_Columns]:
    """Return where q, k, v, z, b and a are."""
    values = group * value_dim
    if is_apart:
        keys = key_heads * key_dim
        qkv = [(0, 0, key_dim), (0, keys, key_dim), (0, 2 * keys, values)]
        return [*qkv, (1, 0, values), (2, 0, group), (3, 0, group)]
    of_head = 2 * key_dim + 2 * values
    firsts = (0, key_dim, 2 * key_dim, 2 * key_dim + values)
    return [*((0, first, of_head) for first in firsts), (1, 0, 2 * group), (1, group, 2 * group)]


def _mamba(module: nn.Module) -> Mixer:
    """Describe Mamba 2: its C, B and x are q, k and v, and a group is a key head."""
    parts = Parts(module)
    layer, convolution, a_log, dt_bias, skip, output, step_limits = parts.any_of(_MAMBA_PARTS)
    norm = parts.maybe([("norm",)])
    parts.end()
    groups, heads, key_dim, value_dim = (int(parts.number([name])) for name in _MAMBA_SIZES)
    keys, values = groups * key_dim, heads * value_dim
    options = {
        "recurrence": "additive",
        "columns": _mamba_columns(groups, heads // groups, key_dim, value_dim),
        "heads": (groups, heads),
        "dims": (key_dim, value_dim),
        "decay": _decay(a_log),
        "dt_bias": floats_of(dt_bias),
        "step_limits": step_limits,
        "skip": floats_of(skip),
        "norm_width": getattr(norm, "group_size", values),
        "gates_first": not getattr(norm, "norm_before_gate", False),
    }
    channels = np.roll(np.arange(values + 2 * keys), -values)
    channels[: 2 * keys] = np.roll(channels[: 2 * keys], -keys)
    return Mixer(
        [layer, output], convolution, 2, _head_norm(norm), options, channels=channels.tolist()
    )


def _mamba_columns(groups: int, group: int, key_dim: int, value_dim: int) -> list[_Columns]:
    """Return where q, k, v, z, b and a are; b is not there."""
    keys, width = groups * key_dim, group * value_dim
    k = 2 * groups * width
    q, v = (0, k + keys, key_dim), (0, groups * width, width)
    return [q, (0, k, key_dim), v, (0, 0, width), _NOWHERE, (0, k + 2 * keys, group)]


def _short_convolution(module: nn.Module) -> Mixer:
    """Describe that of LFM2: a gate before the convolution, one after it, and x."""
    parts = Parts(module)
    layer, convolution, output = parts.any_of(("in_proj", "conv", "out_proj"))
    parts.end()
    size = len(convolution.weight)
    width = math.gcd(size, _CHANNELS)
    b, z, v = ((0, first * size, width) for first in range(3))
    options = {
        "recurrence": "none",
        "columns": [_NOWHERE, _NOWHERE, v, z, b, _NOWHERE],
        "heads": (size // width, size // width),
        "dims": (0, width),
    }
    return Mixer([layer, output], convolution, 1, ([], 0.0), options)


_KINDS: Final[tuple[Callable[[nn.Module], Mixer], ...]] = (
    _gated_delta_net,
    _mamba,
    _short_convolution,
)


def _decay(a_log: mx.array) -> list[float]:
    return floats_of(mx.exp(a_log.astype(mx.float32)))


def _head_norm(norm: nn.Module | None) -> tuple[list[float], float]:
    if norm is None:
        return [], 0.0
    return floats_of(norm.weight), Parts(norm).number(_NORM_EPS_NAMES)
