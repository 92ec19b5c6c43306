"""Checks at load how a model can be served from the paged pool."""
