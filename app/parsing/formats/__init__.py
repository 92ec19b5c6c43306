"""The formats of messages by name, and which one a model writes."""
