"""vLLM's additions: tokens of texts, the rendered prompt, the load."""
