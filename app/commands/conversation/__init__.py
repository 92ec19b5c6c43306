"""A conversation in a terminal: reading lines, streaming answers, commands that begin with a slash."""
