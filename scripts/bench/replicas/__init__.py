"""Measures replicas behind a router with the traces that scripts/simulation simulates."""
