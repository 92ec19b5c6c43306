"""Replicas of the server behind a router, as processes of this machine: `python -m scripts.cluster`."""
