"""What is known of a model that is loaded, for all that is above the backend; no tensors."""
