"""The KV pool of a GPU, which kernels write and read in place through the block tables."""
