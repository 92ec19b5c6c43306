"""Builds an engine: chooses the platform, opens an executor on it, and sizes the pool."""
