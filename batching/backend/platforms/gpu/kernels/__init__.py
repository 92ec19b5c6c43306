"""GPU kernels in one dialect for Metal and CUDA."""
