"""`/v1/conversations`: items that responses and clients add, and responses go on from."""
