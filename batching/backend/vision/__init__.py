"""Vision towers of mlx-vlm, and the rows of images in a model's steps."""
