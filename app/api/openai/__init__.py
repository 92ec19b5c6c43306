"""OpenAI's APIs, a folder for each."""
