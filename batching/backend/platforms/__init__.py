"""What puts the fast paths of one kind of machine into a model."""
