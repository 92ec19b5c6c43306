"""Modules that call the kernels in place of those of MLX and mlx-lm."""
