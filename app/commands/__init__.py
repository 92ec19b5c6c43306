"""The commands of the terminal, beside the server itself."""
