"""Keys, values and states of requests in the kernels' own memory."""
