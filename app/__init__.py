"""HTTP and text: the server that clients reach, around the engine."""

__version__ = "0.1.0"
