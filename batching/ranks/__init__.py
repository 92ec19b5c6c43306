"""One model over several processes: rank 0 has the scheduler, the others run what it plans."""
