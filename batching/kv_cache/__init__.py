"""Blocks and states of requests: allocation, prefix hits, checkpoints."""
