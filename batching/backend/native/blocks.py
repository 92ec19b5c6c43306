"""Transformer blocks whose attention and MLP are an operation each.

A block is recognised by the modules that it has, and a fused path takes its place if it computes what
the block computes: a wrong guess costs time and changes no output.  What a block has in place of a
gated MLP, as a mixture of experts, stays a module of the model; a block of another form has its
attention and its MLP replaced alone.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.attention import hook_attention
from batching.backend.native.cache import NativeLayerCache
from batching.backend.native.fused_check import FusedCheck
from batching.backend.native.halves import Around, AttentionHalf, MlpHalf, Parts, UnknownPart
from batching.backend.native_loader import Native

_ATTENTION: Final = (("self_attn",), ("attention",))
# Of a block or of attention; the first one has many names, but is given without.
_PARAMETERS: Final = ("x", "mask", "cache")
_RESIDUAL: Final = ("residual_multiplier",)


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
)


class FusedBlock:
    """Both halves of a block, one after the other."""

    def __init__(self, kernels: Any, block: nn.Module) -> None:
        parts = Parts(block)
        (attention,) = parts.any_of(*_ATTENTION)
        norms, self.mlp_name = _norms(parts.left)
        residual = parts.number(_RESIDUAL, 1.0)
        around = [
            Around(block.get(norm), block.get(output_norm), residual)
            for norm, output_norm in (norms[:2], norms[2:])
        ]
        self.attention = AttentionHalf(kernels, attention, around[0])
        mlp = block[self.mlp_name]
        self._mlp: Callable[[mx.array], mx.array]
        try:
            self._mlp = MlpHalf(kernels, mlp, around[1])
        except UnknownPart:
            self._mlp = _UnfusedMlp(mlp, around[1])

    @property
    def is_whole(self) -> bool:
        """Whether the MLP is one operation, too."""
        return isinstance(self._mlp, MlpHalf)

    def __call__(self, x: mx.array, mask: Any, cache: NativeLayerCache) -> mx.array:
        return self._mlp(self.attention(x, mask, cache))


class _UnfusedMlp:
    """What a model has in place of a gated MLP."""

    def __init__(self, mlp: nn.Module, around: Around) -> None:
        self._mlp = mlp
        self._around = around

    def __call__(self, x: mx.array) -> mx.array:
        norm, output_norm, residual = vars(self._around).values()
        # A module without arrays is an empty dict.
        output: mx.array = self._mlp(x if norm is None else norm(x))
        output = output if output_norm is None else output_norm(output)
        return x + (output if residual == 1 else residual * output)


def _norms(names: set[str]) -> tuple[_Norms, str]:
    """Return which norms are meant if but for them there is one name, and this."""
    for norms in _NORMS:
        others = names - set(norms)
        if len(names) - len(others) == len(norms) - norms.count(None) and len(others) == 1:
            return norms, others.pop()
    raise UnknownPart(f"a block has {names}")


def replace_blocks(model: nn.Module, native: Native) -> None:
    """Make blocks, or else attention and MLPs, run as operations on the kernels' pool."""
    kernels = native.module
    check = FusedCheck(native)
    hook_attention(model)
    modules = model.modules()
    blocks = [module for module in modules if _replace_block(module, kernels, check)]
    inside = {id(child) for block in blocks for child in block.children().values()}
    for module in modules:
        if id(module) not in inside:
            _replace_attention(module, kernels, check)
        _replace_mlp(module, kernels)


def _replace_block(block: nn.Module, kernels: Any, check: FusedCheck) -> bool:
    try:
        fused = FusedBlock(kernels, block)
    except UnknownPart:
        return False
    mlp = block[fused.mlp_name]
    if not fused.is_whole:
        # Its experts are the same in both ways, and might be chosen by the last bit.
        block[fused.mlp_name] = nn.Identity()
    compared = fused if fused.is_whole else FusedBlock(kernels, block)
    others = check.others(block, fused.attention, compared)
    block[fused.mlp_name] = mlp
    if others is not None:
        _replace(block, fused.attention, fused, others)
    return others is not None


def _replace_attention(attention: nn.Module, kernels: Any, check: FusedCheck) -> None:
    try:
        half = AttentionHalf(kernels, attention)
    except UnknownPart:
        return
    others = check.others(attention, half, half)
    if others is not None:
        _replace(attention, half, half, others)


def _replace(
    module: nn.Module,
    attention: AttentionHalf,
    fused: FusedBlock | AttentionHalf,
    others: tuple[None, ...],
) -> None:
    """Make a module an instance of a subclass that runs fused where the cache is of the kernels.

    others: what it returns beside its output, that nothing reads if its cache is not shared.
    """
    plain = type(module)

    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        more = {**dict(zip(_PARAMETERS, given, strict=False)), **named}
        x, mask, cache = (more.pop(name, None) for name in _PARAMETERS)
        is_known = len(given) <= len(_PARAMETERS) and all(value is None for value in more.values())
        if not is_known or not attention.takes(x, cache):
            return plain.__call__(self, *given, **named)
        output = self._fused(x, mask, cache)
        return (output, *others) if others else output

    module.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    module._fused = fused


def _replace_mlp(mlp: nn.Module, kernels: Any) -> None:
    try:
        half = MlpHalf(kernels, mlp)
    except UnknownPart:
        return
    plain = type(mlp)

    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        is_known = len(given) == 1 and not named
        return self._fused(*given) if is_known else plain.__call__(self, *given, **named)

    mlp.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    mlp._fused = half
