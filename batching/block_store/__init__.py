"""Keys, values and states on disk: files, and the threads that read and write them. Nothing here uses MLX."""
