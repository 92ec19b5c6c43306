"""Puts the prompts of a file into the prefix cache."""
