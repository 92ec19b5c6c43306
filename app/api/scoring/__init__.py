"""`/v1/rerank` and `/v1/score`."""
