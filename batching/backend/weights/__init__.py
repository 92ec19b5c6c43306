"""Weights that are not kept as their files store them."""
