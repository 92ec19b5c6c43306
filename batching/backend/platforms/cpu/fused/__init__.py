"""Halves of transformer blocks, and whole ones, as operations of the kernels."""
