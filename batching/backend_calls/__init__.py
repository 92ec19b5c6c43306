"""What others ask of the backend: MLX is imported when it is called, and not before."""
