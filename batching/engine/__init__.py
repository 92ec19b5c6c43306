"""The engine's thread, and the streams between it and the event loop."""
