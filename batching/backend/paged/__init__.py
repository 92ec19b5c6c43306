"""The KV pool in MLX arrays, and attention over its blocks."""
