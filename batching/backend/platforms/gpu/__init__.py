"""The KV pool of a GPU, which kernels of this project write and read in place through the block tables."""
