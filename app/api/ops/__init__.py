"""Probes, metrics, models, documents and the event stream of the machine room."""
