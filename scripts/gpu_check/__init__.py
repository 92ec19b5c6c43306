"""`make gpu-check`: what is right on this GPU and how fast it is, as one Markdown report."""
