"""Chat templates: the model's own and those of requests, rendered in processes with limits."""
