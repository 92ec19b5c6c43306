"""Replicas behind a router, simulated: the real schedulers, with a clock instead of a model."""
