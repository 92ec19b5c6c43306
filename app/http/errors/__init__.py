"""Exceptions as responses: a status, a code and one short message."""
