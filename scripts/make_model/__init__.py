"""Models of random weights in published shapes, for benchmarks: nothing is downloaded."""
