"""The layers of a model as one operation a step.

In a model of many small layers, Python and MLX's graph take longer for an operation or two of each than
for all else in a step.  So the call of the first layer runs all of them, and the others' return what
they get.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.hooks.undo import Changes
from batching.backend.platforms.cpu.fused.arguments import Arguments, More, Parameters
from batching.backend.platforms.cpu.fused.blocks import FusedBlock
from batching.backend.platforms.cpu.fused.halves import AttentionHalf, MlpHalf
from batching.backend.platforms.cpu.fused.latent import LatentHalf
from batching.backend.platforms.cpu.fused.mixture import MixtureHalf
from batching.backend.platforms.cpu.fused.recurrent import RecurrentHalf
from batching.backend.platforms.cpu.fused.stacking import Stacking

Fused = FusedBlock | AttentionHalf | LatentHalf | RecurrentHalf | MlpHalf | MixtureHalf
# What needs neither mask nor cache.
_BY_ROW: Final = (MlpHalf, MixtureHalf)
_NOTHING: Final = mx.array(0)


class StackLayer(NamedTuple):
    fused: Fused
    parameters: Parameters

    def run(self, x: mx.array, call: Arguments) -> mx.array:
        if isinstance(self.fused, _BY_ROW):
            return self.fused(x)
        return self.fused(x, call.mask, call.cache)

    def add_to(self, stacking: Stacking, call: Arguments) -> bool:
        """Add it, if that is what its call has computed."""
        if not call.is_known:
            return False
        if isinstance(self.fused, _BY_ROW):
            self.fused.add_to(stacking)
            return True
        half = self.fused.attention if isinstance(self.fused, FusedBlock) else self.fused
        if not half.takes(call.x, call.cache):
            return False
        self.fused.add_to(stacking, call.mask, call.cache)
        return True


class _Call(NamedTuple):
    arguments: Arguments
    output: mx.array


class LayerStack:
    """The layers of a model, to be called in place of them.

    The first step on a pool runs layer by layer, which tells what each of them is called with.  From
    then on they are one operation, as long as they are called with the same.
    """

    def __init__(self, kernels: Any, layers: Sequence[StackLayer]) -> None:
        self._kernels, self._layers = kernels, layers
        self._is_on = True
        # What each layer is called with beside x.
        self.more: list[More] = []
        self._calls: list[_Call] = []
        self._stacking: Stacking | None = None
        # While a step passes through the layers, the first one's input, and the last one's output.
        self._x: mx.array | None = None
        self.passing: mx.array | None = None

    def end(self) -> None:
        """The last layer has been called."""
        self._x = self.passing = None

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        given: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Return the output of a layer, which `compute` computes."""
        if index == 0 and self._runs(given, named):
            return self.passing
        if self.passing is not None:
            given = (self._input_of(index, given), *given[1:])
        output = compute(*given, **named)
        if self._is_on:
            self._record(index, given, named, output)
        return output

    def _runs(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Run all layers, if they are one operation on this pool."""
        self.passing, stacking = None, self._stacking
        is_known = stacking is not None and self.more[0].is_same(given, named)
        if stacking is None or not is_known or not stacking.has_pools:
            return False
        self._x, self.passing = given[0], stacking.run(given[0])
        return True

    def _input_of(self, index: int, given: tuple[Any, ...]) -> mx.array:
        """Return what a layer is to get that is called in another way than before.

        It comes too late for this step to be one operation, and no other will be.
        """
        x, output = self._x, self.passing
        self._is_on, self._stacking, self._x, self.passing = False, None, None, None
        if x is None or not given or given[0] is not output:
            raise RuntimeError("the model changes what a layer returns, which it did not before")
        for layer, call in zip(self._layers[:index], self._calls, strict=False):
            x = layer.run(x, call.arguments)
        return x

    def _record(
        self, index: int, given: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> None:
        """Keep the call if it follows those of the layers before."""
        calls = self._calls
        if index == 0:
            self._stacking = None
            calls.clear()
            self.more.clear()
        x = given[0] if given else None
        follows = x is not None and (x is calls[-1].output if calls else index == 0)
        if not follows or len(calls) != index or not isinstance(output, mx.array):
            calls.clear()
            return
        arguments = self._layers[index].parameters.arguments(given, named)
        calls.append(_Call(arguments, output))
        self.more.append(More(given[1:], named))
        if len(calls) == len(self._layers):
            self._stack()

    def _stack(self) -> None:
        """Make one operation of the layers, if each is one on the pool, and drop their rows."""
        stacking = Stacking(self._kernels)
        # A cache can take no mask of its kind.
        with suppress(TypeError, ValueError):
            if all(
                layer.add_to(stacking, call.arguments)
                for layer, call in zip(self._layers, self._calls, strict=True)
            ):
                self._stacking = stacking
        self._calls = [_Call(call.arguments._replace(x=None), _NOTHING) for call in self._calls]


def stack_layers(model: nn.Module, kernels: Any) -> None:
    """Make the layers of a model one operation, if its code only calls one after the other."""
    lists = [value for m in model.modules() for value in m.values() if isinstance(value, list)]
    for layers in lists:
        if len(layers) > 1 and all(_is_fused(layer) for layer in layers):
            described = [StackLayer(layer._fused, Parameters(layer)) for layer in layers]
            takes_more = any(layer.parameters.takes_rows for layer in described)
            # The first one's cache tells on which pool a step is.
            has_cache = not isinstance(described[0].fused, _BY_ROW)
            if has_cache and not takes_more and _only_passes_on(model, layers):
                stack = LayerStack(kernels, described)
                for index, layer in enumerate(layers):
                    _replace(layer, index, stack, is_last=layer is layers[-1])


def _is_fused(layer: Any) -> bool:
    fused = vars(layer).get("_fused") if isinstance(layer, nn.Module) else None
    return isinstance(fused, Fused) and getattr(fused, "is_whole", True)


def _replace(layer: nn.Module, index: int, stack: LayerStack, *, is_last: bool) -> None:
    plain = type(layer)
    is_first = index == 0

    @wraps(plain.__call__)
    def call(self: nn.Module, *given: Any, **named: Any) -> Any:
        stack: LayerStack = self._stack
        # As little as possible: all layers do it in each step.
        passes = not is_first and given and given[0] is stack.passing
        if passes and stack.more[index].is_same(given, named):
            if is_last:
                stack.end()
            return given[0]
        return stack.call(index, partial(plain.__call__, self), given, named)

    layer.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    # Not in the class, which lives until garbage is collected: it knows the pool.
    layer._stack = stack


def _only_passes_on(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Tell whether a model's code does nothing with what a layer returns but to call the next one.

    Stand-ins return NaN, but for the last one: logits are finite only if they depend on nothing else.
    """
    changes, outputs = Changes(), list[mx.array]()

    def stand_in(index: int) -> Callable[..., mx.array]:
        def call(self: nn.Module, *given: Any, **named: Any) -> mx.array:
            if len(outputs) != index or (index > 0 and given[0] is not outputs[-1]):
                raise ValueError("layers are not called one after the other")
            is_last = index == len(layers) - 1
            outputs.append(mx.full(given[0].shape, 1.0 if is_last else mx.nan))
            return outputs[-1]

        return call

    for index, layer in enumerate(layers):
        changes.override_call(layer, stand_in(index))
    try:
        logits = model(mx.array([[0]]), cache=make_prompt_cache(model))
        return len(outputs) == len(layers) and bool(mx.isfinite(logits).all())
    except Exception:
        # Any code can be in a model file.
        return False
    finally:
        changes.undo()
