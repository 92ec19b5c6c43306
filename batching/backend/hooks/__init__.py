"""Patches of mlx-lm modules, each of which can be undone."""
