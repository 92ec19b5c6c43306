"""HTTP and text: the server that clients reach, around the engine."""

from typing import Final

__version__ = "0.1.0"
PROGRAM: Final = "mlx-batch-server"
