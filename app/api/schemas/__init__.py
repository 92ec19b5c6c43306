"""Schemas that the APIs share."""
