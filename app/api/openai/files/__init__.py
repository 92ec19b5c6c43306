"""`/v1/files`."""
