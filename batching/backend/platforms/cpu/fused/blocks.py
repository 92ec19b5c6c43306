"""Transformer blocks whose attention and MLP are an operation each.

A block is recognised by the modules that it has, and a fused path takes its place if it computes what
the block computes: a wrong guess costs time and changes no output.  What a block has in place of a
gated MLP or a known mixture of experts stays a module of the model; a block of another form has its
attention and its MLP or mixture replaced alone.
"""

import math
from functools import wraps
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.attention import hook_attention
from batching.backend.hooks.changes import Changes, running
from batching.backend.platforms.cpu.fused.arguments import Parameters
from batching.backend.platforms.cpu.fused.check import FusedAttention, FusedCheck
from batching.backend.platforms.cpu.fused.halves import AttentionHalf, MlpHalf
from batching.backend.platforms.cpu.fused.latent import LatentHalf, is_latent
from batching.backend.platforms.cpu.fused.mixers import is_recurrent
from batching.backend.platforms.cpu.fused.mixture import MixtureHalf
from batching.backend.platforms.cpu.fused.parts import (
    AS_CACHED,
    NOTHING,
    Around,
    OfRows,
    Parts,
    UnknownPart,
)
from batching.backend.platforms.cpu.fused.recurrent import RecurrentHalf
from batching.backend.platforms.cpu.native_loader import Native

_ATTENTION: Final = (("self_attn",), ("attention",), ("linear_attn",), ("mamba",), ("conv",))
# A block of one half.
_ONE_HALF: Final = ("norm", "mixer")
_RESIDUAL: Final = ("residual_multiplier",)
# A residual's factor, before it is divided by the square root of the number of layers.
_DEPTH: Final = ("scale_depth",)
_NUM_LAYERS: Final = ("num_hidden_layers",)
_IS_PARALLEL: Final = ("use_parallel_residual",)


class _Norms(NamedTuple):
    """Names of a block's norms, each of the input or the output of a half."""

    attention: str | None
    attention_output: str | None
    mlp: str | None
    mlp_output: str | None


_NORMS: Final = (
    _Norms("input_layernorm", None, "post_attention_layernorm", None),
    _Norms("operator_norm", None, "ffn_norm", None),
    _Norms("attention_layernorm", None, "feedforward_layernorm", None),
    _Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    _Norms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    _Norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    # Attention and the MLP have one input.
    _Norms("input_layernorm", None, None, None),
)


class FusedBlock:
    """Both halves of a block, one after the other; if not `is_whole`, the MLP is the model's."""

    def __init__(self, kernels: Any, block: nn.Module, *, is_whole: bool = True) -> None:
        parts = Parts(block)
        (attention,) = parts.any_of(*_ATTENTION)
        norms, mlp_name = _norms(parts.left)
        shares_norm = norms.count(None) == len(norms) - 1
        self._is_parallel = shares_norm or bool(parts.number(_IS_PARALLEL, 0))
        if shares_norm:
            norms = norms._replace(mlp=norms.attention)
        residual = _residual(parts)
        around = [
            Around(block.get(norm), block.get(output_norm), residual)
            for norm, output_norm in (norms[:2], norms[2:])
        ]
        self.attention = _attention(kernels, attention, around[0])
        mlp = block[mlp_name]
        half = _mlp_half(kernels, mlp, around[1]) if is_whole else None
        if self._is_parallel and isinstance(half, MixtureHalf):
            half = None
        # Whether the MLP is one operation, too.
        self.is_whole = half is not None
        # The MLP is not: it runs by itself where the cache is not of the kernels.
        self.replaced: list[nn.Module] = attention.modules()
        self.mlp = half or _UnfusedMlp(mlp, around[1])

    def __call__(self, x: mx.array, mask: Any, cache: Any, rows: OfRows = AS_CACHED) -> mx.array:
        attended = self.attention(x, mask, cache, rows)
        if self._is_parallel and not isinstance(self.mlp, MixtureHalf):
            return self.mlp(x, attended)
        return self.mlp(attended)


class _UnfusedMlp:
    """A module that a model has in place of a gated MLP; it is called as it is."""

    def __init__(self, mlp: nn.Module, around: Around) -> None:
        self.mlp = mlp
        self._around = around

    def __call__(self, x: mx.array, added_to: mx.array | None = None) -> mx.array:
        norm, output_norm, residual = vars(self._around).values()
        # A module without arrays is an empty dict.
        output: mx.array = self.mlp(x if norm is None else norm(x))
        output = output if output_norm is None else output_norm(output)
        added_to = x if added_to is None else added_to
        return added_to + (output if residual == 1 else residual * output)


def _residual(parts: Parts) -> float:
    depth = parts.number(_DEPTH, 0.0)
    if depth:
        return depth / math.sqrt(parts.number(_NUM_LAYERS))
    return parts.number(_RESIDUAL, 1.0)


def _attention(kernels: Any, attention: nn.Module, around: Around = NOTHING) -> FusedAttention:
    if is_recurrent(attention):
        return RecurrentHalf(kernels, attention, around)
    half = LatentHalf if is_latent(attention) else AttentionHalf
    return half(kernels, attention, around)


def _mlp_half(
    kernels: Any, mlp: nn.Module, around: Around = NOTHING
) -> MlpHalf | MixtureHalf | None:
    for kind in (MlpHalf, MixtureHalf):
        try:
            return kind(kernels, mlp, around)
        except (UnknownPart, ValueError):
            # The kernels refuse parts that do not fit to each other.
            pass
    return None


def _norms(names: set[str]) -> tuple[_Norms, str]:
    """Return the norms of a block that has one other name besides theirs, and that name."""
    for norms in _NORMS:
        others = names - set(norms)
        if len(names) - len(others) == len(norms) - norms.count(None) and len(others) == 1:
            return norms, others.pop()
    raise UnknownPart(f"a block has {names}")


def replace_blocks(model: nn.Module, native: Native, changes: Changes) -> None:
    """Make blocks, or else attention and MLPs, run as operations on the kernels' pool.

    changes: gets the function for attention; the modules are replaced for good.
    """
    hook_attention(model, changes)
    with running(model):
        _replace_blocks(model, native.module, FusedCheck(native))


def _replace_blocks(model: nn.Module, kernels: Any, check: FusedCheck) -> None:
    replaced: set[int] = set()
    # A module comes before those in it.
    for module in model.modules():
        if id(module) in replaced:
            continue
        inside = (
            _replace_block(module, kernels, check)
            or _replace_mlp(module, kernels, check)
            or _replace_attention(module, kernels, check)
        )
        replaced |= {id(each) for each in inside}


def _replace_block(block: nn.Module, kernels: Any, check: FusedCheck) -> list[nn.Module]:
    """Fuse a block as far as that computes the same; return the modules in it to leave alone."""
    for is_whole in (True, False):
        try:
            fused = FusedBlock(kernels, block, is_whole=is_whole)
        except UnknownPart:
            break
        others = check.others(block, fused.attention, fused, is_whole=is_whole)
        if others is not None:
            _replace(block, fused.attention, fused, others)
            return fused.replaced
        if not fused.is_whole:
            break
    return []


def _one_half(module: nn.Module) -> tuple[nn.Module, Around]:
    """Return a half and what is around it, if a module is a block of one, else the module."""
    if set(module) == set(_ONE_HALF):
        return module["mixer"], Around(module["norm"], None, 1.0)
    return module, NOTHING


def _replace_attention(module: nn.Module, kernels: Any, check: FusedCheck) -> list[nn.Module]:
    """Fuse attention, or a block of it and a norm."""
    try:
        half = _attention(kernels, *_one_half(module))
    except UnknownPart:
        return []
    others = check.others(module, half, half)
    if others is None:
        return []
    _replace(module, half, half, others)
    inside: list[nn.Module] = module.modules()
    return inside


def _replace(
    module: nn.Module,
    attention: FusedAttention,
    fused: FusedBlock | FusedAttention,
    others: tuple[None, ...],
) -> None:
    """Make a module an instance of a subclass that runs fused where the cache is of the kernels.

    others: what it returns beside its output, that nothing reads if its cache is not shared.
    """
    plain, parameters = type(module), Parameters(module)

    @wraps(plain.__call__)
    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        x, mask, cache, rows, is_known = parameters.arguments(given, named)
        if not is_known or not attention.takes(x, cache):
            return plain.__call__(self, *given, **named)
        output = self._fused(x, mask, cache, rows)
        return (output, *others) if others else output

    module.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    module._fused = fused


def _replace_mlp(module: nn.Module, kernels: Any, check: FusedCheck) -> list[nn.Module]:
    """Fuse an MLP or a mixture, or a block of it and a norm."""
    mlp, around = _one_half(module)
    half = _mlp_half(kernels, mlp, around)
    # A lone MLP was known by what it computes.
    is_sure = mlp is module and isinstance(half, MlpHalf)
    if half is None or not (is_sure or check.is_alike(module, half)):
        return []
    replaced: list[nn.Module] = module.modules()
    plain = type(module)
    # Arguments for attention, which a block is given and its MLP does not read.
    unread = set() if mlp is module else {"mask", "cache"}

    @wraps(plain.__call__)
    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        is_known = len(given) == 1 and named.keys() <= unread
        return self._fused(*given) if is_known else plain.__call__(self, *given, **named)

    module.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    module._fused = half
    return replaced
