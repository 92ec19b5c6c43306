"""Responses that are stored, and what requests go on from."""
