"""Times the parts of the engine one by one: where a step's time goes, and what must not grow."""

# Before any module here imports MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401
