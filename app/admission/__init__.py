"""Accepts or rejects requests before they cost anything, and counts those in flight."""
