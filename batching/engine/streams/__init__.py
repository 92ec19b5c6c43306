"""The streams of tokens, from the engine to the callers in the event loop."""
