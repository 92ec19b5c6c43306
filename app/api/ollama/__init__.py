"""Ollama's API, under `/api/`."""
