"""CPU kernels in C++ for the model types of mlx-lm: `_native` is the extension.

What does not fit the extension must not load it, so its versions can be read without it.

INTERFACE_VERSION: of `_native.pyi`; the server calls one of them.
MLX_VERSION: that of the MLX that the extension was built against, the only one that it runs with.
"""

from typing import Final

from mlx_cpu_kernels._build import MLX_VERSION

__all__ = ["INTERFACE_VERSION", "MLX_VERSION"]

INTERFACE_VERSION: Final = 4
