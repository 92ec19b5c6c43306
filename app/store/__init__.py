"""The models on this machine and on the hub: found, described, downloaded, deleted."""
