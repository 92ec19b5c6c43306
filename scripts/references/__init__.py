"""Writers of golden files: each asks another implementation, in an environment of its own."""
