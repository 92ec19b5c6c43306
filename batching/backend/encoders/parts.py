"""What the modules of all encoders have in common."""

from typing import Final

import mlx.nn as nn

ACTIVATIONS: Final = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
}


class Part(nn.Module):
    """A module of an encoder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
