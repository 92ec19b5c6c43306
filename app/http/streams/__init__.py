"""Responses that are streamed: their beginning, their events, what is not read yet."""
