"""The architectures of llama.cpp: their names, values and changes, as mlx-lm has them."""
