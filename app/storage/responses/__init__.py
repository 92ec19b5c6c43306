"""The store of responses, and of the conversations that they add to."""
