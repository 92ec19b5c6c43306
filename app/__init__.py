"""HTTP and text: what clients see of the engine."""

__version__ = "0.1.0"
