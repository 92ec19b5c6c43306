"""The processor's features, and the cores that may be used."""
