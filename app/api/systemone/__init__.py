"""`/v1/systemone`."""
