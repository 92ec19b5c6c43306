"""The KV pool of a GPU, on which our own kernels work in place."""
