"""Models on this machine, and a hub that stands in."""
