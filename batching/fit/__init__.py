"""How much memory a model needs, computed from its files before it is loaded."""
