"""Vectors and scores from hidden states."""
