"""One model over several machines: who they are, how their processes start, and how they end."""
