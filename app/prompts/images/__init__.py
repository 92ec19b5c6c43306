"""Images in the text of a prompt: marks, and where their tokens are."""
