"""What MLX computes slowly on an x86 CPU, computed by numpy instead.

MLX's element-wise kernels are scalar there: an exponential takes 11 ns, against 0.4 ns in
numpy's vector loops, and they run on one core.  So float32 attention and activations leave
MLX's graph here, at the price of an evaluation (about 40 µs) each; the products of the
linear layers stay with MLX and its BLAS.
"""
