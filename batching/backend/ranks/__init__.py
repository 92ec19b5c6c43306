"""One model over several processes: the part of each rank, and whether all of them together are right."""
