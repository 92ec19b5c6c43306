"""What requests keep from step to step, in the memory of the kernels."""
