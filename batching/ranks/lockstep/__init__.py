"""What ranks do alike: they decide the same while they open a model, and run the same steps."""
