"""Images: decoded in processes with limits."""
