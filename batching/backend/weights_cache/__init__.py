"""Packed weights in files, for the next start."""
