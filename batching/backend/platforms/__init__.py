"""The fast paths of each kind of machine, put into a model."""
