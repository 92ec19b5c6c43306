"""The models and the caches that this machine keeps: `models` and `cache`."""
