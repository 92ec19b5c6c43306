"""A request to the engine: its frozen spec, its sampling parameters."""
