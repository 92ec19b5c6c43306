"""Writes models for programs that train."""

from pathlib import Path


def export_gguf(path: Path, directory: Path, dtype: str) -> None:
    """Write the model of a GGUF file as a directory that mlx-lm loads, its weights dequantized to a type.

    dtype: `float32`, `bfloat16` or `float16`.

    Raises:
        ModelLoadError: the file holds no model that is served, or one that no config.json describes.
        OSError: the directory cannot be written.
    """
    from batching.backend.gguf.export import write_directory

    write_directory(path, directory, dtype)
