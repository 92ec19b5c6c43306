"""Written by CMake beside the extension."""

MLX_VERSION: str
