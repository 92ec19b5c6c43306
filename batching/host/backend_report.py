"""What the backend says of itself, without a model; no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What MLX is here.

    device: with the name of a GPU.
    wired: the most bytes that macOS lets a GPU wire; None elsewhere.
    has_kernels: whether the native kernels compute, or are not needed since a GPU does.
    kernels: which they are, or why they are off.
    """

    mlx_version: str
    device: str
    memory: int
    wired: int | None
    has_kernels: bool
    kernels: str
