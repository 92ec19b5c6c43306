"""Transformer blocks whose attention and MLP are an operation each.

A block is recognised by the modules that it has, and a fused path takes its place if it computes what
the block computes: a wrong guess costs time and changes no output.  What a block has in place of a
gated MLP or a known mixture of experts stays a module of the model; a block of another form has its
attention and its MLP or mixture replaced alone.
"""

from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.attention import hook_attention
from batching.backend.native.fused_check import FusedCheck
from batching.backend.native.halves import (
    NOTHING,
    Around,
    AttentionHalf,
    MlpHalf,
    Parts,
    UnknownPart,
)
from batching.backend.native.linear_attention import LinearAttentionHalf
from batching.backend.native.mixture import MixtureHalf
from batching.backend.native_loader import Native

_ATTENTION: Final = (("self_attn",), ("attention",), ("linear_attn",))
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
    """Both halves of a block, one after the other; if not `is_whole`, the MLP is the model's."""

    def __init__(self, kernels: Any, block: nn.Module, *, is_whole: bool = True) -> None:
        parts = Parts(block)
        (attention,) = parts.any_of(*_ATTENTION)
        norms, mlp_name = _norms(parts.left)
        residual = parts.number(_RESIDUAL, 1.0)
        around = [
            Around(block.get(norm), block.get(output_norm), residual)
            for norm, output_norm in (norms[:2], norms[2:])
        ]
        kind = LinearAttentionHalf if "conv1d" in attention else AttentionHalf
        self.attention: AttentionHalf | LinearAttentionHalf = kind(kernels, attention, around[0])
        mlp = block[mlp_name]
        half = _mlp_half(kernels, mlp, around[1]) if is_whole else None
        # Whether the MLP is one operation, too.
        self.is_whole = half is not None
        # The MLP is not: it runs by itself where the cache is not of the kernels.
        self.replaced: list[nn.Module] = attention.modules()
        self.mlp = half or _UnfusedMlp(mlp, around[1])

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return self.mlp(self.attention(x, mask, cache))


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
    replaced: set[int] = set()
    # A module comes before those in it.
    for module in model.modules():
        if id(module) in replaced:
            continue
        inside = _replace_block(module, kernels, check) or _replace_mlp(module, kernels, check)
        replaced |= {id(each) for each in inside}
        if not inside:
            _replace_attention(module, kernels, check)


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
    attention: AttentionHalf | LinearAttentionHalf,
    fused: FusedBlock | AttentionHalf,
    others: tuple[None, ...],
) -> None:
    """Make a module an instance of a subclass that runs fused where the cache is of the kernels.

    others: what it returns beside its output, that nothing reads if its cache is not shared.
    """
    plain = type(module)

    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        known = _known(given, named)
        if known is None or not attention.takes(known[0], known[2]):
            return plain.__call__(self, *given, **named)
        output = self._fused(*known)
        return (output, *others) if others else output

    module.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    module._fused = fused


def _known(given: tuple[Any, ...], named: dict[str, Any]) -> list[Any] | None:
    """Return x, mask and cache of a call; None if there are other arguments."""
    if len(given) > len(_PARAMETERS):
        return None
    known = [*given, None, None, None][: len(_PARAMETERS)]
    for name, value in named.items():
        if name in _PARAMETERS:
            known[_PARAMETERS.index(name)] = value
        elif value is not None:
            return None
    return known


def _replace_mlp(mlp: nn.Module, kernels: Any, check: FusedCheck) -> list[nn.Module]:
    half = _mlp_half(kernels, mlp)
    # An MLP was known by what it computes.
    if half is None or (isinstance(half, MixtureHalf) and not check.is_alike(mlp, half)):
        return []
    replaced: list[nn.Module] = mlp.modules()
    plain = type(mlp)

    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        is_known = len(given) == 1 and not named
        return self._fused(*given) if is_known else plain.__call__(self, *given, **named)

    mlp.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    mlp._fused = half
    return replaced
