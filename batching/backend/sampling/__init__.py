"""One vectorised sampler; a sample depends on seed and position only."""
