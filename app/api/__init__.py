"""One file for each path."""
