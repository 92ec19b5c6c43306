"""Microbenchmarks of the native kernels."""

# Before any module here imports MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401
