"""Runs steps on a model, from its opening to its closing."""
