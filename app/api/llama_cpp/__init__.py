"""Endpoints of llama.cpp's server."""
