"""A file for each target, whose TARGET it is."""
