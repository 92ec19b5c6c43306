"""Serves the lines of batch files beside live requests."""
