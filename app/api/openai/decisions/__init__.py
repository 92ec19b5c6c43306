"""`/v1/decisions`."""
