"""Containers behind the block manager: empty runs, ages of blocks."""
