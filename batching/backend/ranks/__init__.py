"""One model over several processes: what rank 0 builds, and what the others run."""
