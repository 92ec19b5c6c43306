"""Prompts whose answer is a score: of rerankers, cross-encoders, typed questions."""
