"""How the native kernels store weights."""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear

from batching.backend.storage import kernel_bits


@dataclass(frozen=True)
class Packing:
    """How weights are packed; see `replace_modules`."""

    kernels: Any
    input_bits: int

    def of(self, module: nn.Module) -> Any:
        """Pack the weights of a module, quantized or not: a matrix, or one for each expert."""
        if "scales" not in module:
            return self.kernels.pack(module.weight)
        return self.kernels.pack(
            module.weight, module.scales, module.get("biases"), module.bits, self.input_bits
        )


def is_packable(module: nn.Module) -> bool:
    """Tell whether the kernels know a quantization of what they know."""
    if isinstance(module, QuantizedMultiLinear):
        return False
    return kernel_bits(module.mode, module.bits, module.group_size) is not None


def replace_class(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Make a module an instance of another class, without its arrays."""
    module.clear()
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)
