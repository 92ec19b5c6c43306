"""Commands of the terminal, against a server with canned answers."""
