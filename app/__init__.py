"""HTTP and text: what clients see of the engine."""
