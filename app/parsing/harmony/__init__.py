"""gpt-oss's channels."""
