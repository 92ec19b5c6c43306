"""Bodies on the wire, as OpenAI defines them."""
