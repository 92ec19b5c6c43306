"""Reads GGUF files: config, weights, tokenizer."""
