"""The running server, as commands find it and ask it."""
