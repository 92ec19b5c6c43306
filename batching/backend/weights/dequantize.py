"""Quantized weights of a model, dequantized."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model

_LAYERS = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def dequantize(model: nn.Module, keep: Callable[[nn.Module], bool] = lambda _: False) -> nn.Module:
    """Return the model without quantized weights but those to keep.

    Those of each head are dequantized, too, which mlx-lm leaves out.
    """
    dense = [
        (name, _dense(module))
        for name, module in model.named_modules()
        if isinstance(module, (QuantizedMultiLinear, *_LAYERS)) and not keep(module)
    ]
    if dense:
        model.update_modules(tree_unflatten(dense))
    return model


def _dense(module: nn.Module) -> nn.Module:
    if isinstance(module, QuantizedMultiLinear):
        return _dense_heads(module)
    if isinstance(module, QuantizedSwitchLinear) and module.global_scale is not None:
        return _dense_experts(module)
    holder = nn.Sequential(module)
    dequantize_model(holder)
    [made] = holder.layers
    assert isinstance(made, nn.Module)
    return made


def _dense_experts(module: QuantizedSwitchLinear) -> SwitchLinear:
    """Dequantize experts that have a scale each beside those of their groups."""
    weights = [
        mx.dequantize(
            *parts[:2],
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
            global_scale=parts[2],
        )
        for parts in zip(module.weight, module.scales, module.global_scale, strict=True)
    ]
    num_experts, output_dims, input_dims = len(weights), *weights[0].shape
    made = SwitchLinear(input_dims, output_dims, num_experts, bias="bias" in module)
    made.weight = mx.stack(weights)
    if "bias" in module:
        made.bias = module.bias
    return made


def _dense_heads(module: QuantizedMultiLinear) -> MultiLinear:
    weight = mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
    num_heads, output_dims, input_dims = weight.shape
    made = MultiLinear(input_dims, output_dims, num_heads)
    made.weight = weight
    return made
