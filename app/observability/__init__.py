"""Logs, metrics, traces, and snapshots for the machine room."""
