"""Reasoning, separated from content."""
