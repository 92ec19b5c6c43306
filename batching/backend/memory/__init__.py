"""Memory of host and device: what is free, how many blocks fit."""
